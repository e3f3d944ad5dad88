"""Which blocks a tier takes in."""

from kvtier.core.admission.base import Admission, Admit, Offer, Reject, Throttle, Verdict
from kvtier.core.admission.everything import AdmitEverything

__all__ = ["Admission", "Admit", "AdmitEverything", "Offer", "Reject", "Throttle", "Verdict"]
