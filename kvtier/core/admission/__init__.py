"""Which blocks a tier takes in."""

from kvtier.core.admission.base import (
    Admission,
    Admit,
    Occasion,
    Offer,
    Reject,
    Rule,
    Throttle,
    Verdict,
)
from kvtier.core.admission.everything import AdmitEverything
from kvtier.core.admission.gate import QuantileGate
from kvtier.core.admission.worth import AdmitByWorth

__all__ = [
    "Admission",
    "Admit",
    "AdmitByWorth",
    "AdmitEverything",
    "Occasion",
    "Offer",
    "QuantileGate",
    "Reject",
    "Rule",
    "Throttle",
    "Verdict",
]
