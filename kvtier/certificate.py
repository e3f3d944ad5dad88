"""Certificates: PEM files read whole and checked, and the time within which they hold."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import load_pem_x509_certificates

from kvtier.errors import StartError, reason_of

__all__ = ["Certificates", "read_authorities", "read_chain"]

_BYTES_MAX = 1 << 20
"""Four times a system's authorities; a file given by mistake is mostly larger."""

_DUE_S = 14 * 86_400
_DUE_SHARE = 0.25
"""What is renewed by a machine is so when a third of its lifetime is left: then less is late."""

_END = re.compile(rb"-----END [A-Z0-9 ]+-----")


@dataclass(frozen=True, slots=True)
class Certificates:
    """Those of one file, and within which time they are of use."""

    pem: bytes
    """They alone, without what else the file says."""
    not_before_s: int
    not_after_s: int
    first_key: CertificatePublicKeyTypes = field(repr=False, compare=False)
    """The public key of the first one."""

    def complaint(self, now_s: float) -> str:
        """Return what is wrong with the time: no more, not yet, or not for long; else nothing."""
        left_s = self.not_after_s - now_s
        if left_s <= 0:
            return f"expired on {_date(self.not_after_s)}"
        if now_s < self.not_before_s:
            return f"does not hold before {_date(self.not_before_s)}"
        if left_s < min(_DUE_S, _DUE_SHARE * (self.not_after_s - self.not_before_s)):
            return f"expires on {_date(self.not_after_s)}"
        return ""


def read_chain(path: Path, field: str) -> Certificates:
    """Read a certificate and those it descends from: the first to expire ends it. StartError."""
    return _read(path, field, min)


def read_authorities(path: Path, field: str) -> Certificates:
    """Read those to be trusted: of use until the last one expires. Raises StartError.

    While an authority is being exchanged the file has the old one and the new one.
    """
    return _read(path, field, max)


_Span = tuple[datetime, datetime]


def _read(path: Path, field: str, decisive: Callable[[list[_Span]], _Span]) -> Certificates:
    pem = _bytes_of(path, field)
    try:
        found = load_pem_x509_certificates(pem)
        key = found[0].public_key()
        spans = [(each.not_valid_after_utc, each.not_valid_before_utc) for each in found]
    except (ValueError, UnsupportedAlgorithm) as error:
        problem = "has a certificate that is none" if b"-----BEGIN" in pem else "has no certificate"
        raise _refusal(field, f"{path} {problem}") from error
    if pem.count(b"-----BEGIN") != len(_END.findall(pem)):  # its reader takes what comes before
        raise _refusal(field, f"{path} has a certificate that is cut short")
    until, since = decisive(spans)
    return Certificates(
        b"".join(each.public_bytes(Encoding.PEM) for each in found),
        int(since.timestamp()),
        int(until.timestamp()),
        key,
    )


def _bytes_of(path: Path, field: str) -> bytes:
    if path.exists() and not path.is_file():  # a FIFO would keep us waiting for its writer
        raise _refusal(field, f"{path} is no file")
    try:
        with path.open("rb") as file:
            content = file.read(_BYTES_MAX + 1)
    except OSError as error:
        raise _refusal(field, f"{path} cannot be read: {reason_of(error)}") from error
    if len(content) > _BYTES_MAX:
        raise _refusal(field, f"{path} is larger than 1 MiB")
    return content


def _refusal(field: str, problem: str) -> StartError:
    return StartError(field, problem, "give a file of certificates in PEM")


def _date(time_s: float) -> str:
    return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%d %H:%M} UTC"
