"""Admission policies: which blocks a tier accepts."""

from kvtier.core.admission.base import (
    Admission,
    AdmissionDecision,
    Admit,
    AdmitEverything,
    Offer,
    OfferReason,
    RefusalRule,
    Reject,
    Throttle,
)
from kvtier.core.admission.gate import QuantileGate
from kvtier.core.admission.worth import AdmitByWorth

__all__ = [
    "Admission",
    "AdmissionDecision",
    "Admit",
    "AdmitByWorth",
    "AdmitEverything",
    "Offer",
    "OfferReason",
    "QuantileGate",
    "RefusalRule",
    "Reject",
    "Throttle",
]
