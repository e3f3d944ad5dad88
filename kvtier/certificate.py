"""Reads and checks PEM files of certificates, and warns before they expire."""

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
"""Four times the size of a system's CA bundle; a wrong file is usually larger."""

_DUE_S = 14 * 86_400
_DUE_SHARE = 0.25
"""Automatic renewal happens when a third of the lifetime is left, so a quarter is late."""

_END = re.compile(rb"-----END [A-Z0-9 ]+-----")


@dataclass(frozen=True, slots=True)
class Certificates:
    """The certificates of one file, and the time in which they are valid."""

    pem: bytes
    """Only the certificates, without the other contents of the file."""
    not_before_s: int
    not_after_s: int
    first_key: CertificatePublicKeyTypes = field(repr=False, compare=False)
    """Public key of the first certificate."""

    def complaint(self, now_s: float) -> str:
        """Return a warning if the certificates are invalid or expire soon, else ``""``."""
        left_s = self.not_after_s - now_s
        if left_s <= 0:
            return f"expired on {_date(self.not_after_s)}"
        if now_s < self.not_before_s:
            return f"is not valid before {_date(self.not_before_s)}"
        if left_s < min(_DUE_S, _DUE_SHARE * (self.not_after_s - self.not_before_s)):
            return f"expires on {_date(self.not_after_s)}"
        return ""


def read_chain(path: Path, field: str) -> Certificates:
    """Read a certificate chain: valid until the first certificate expires. Raises StartError."""
    return _read(path, field, min)


def read_authorities(path: Path, field: str) -> Certificates:
    """Read trusted CA certificates: valid until the last one expires. Raises StartError.

    During the rotation of a CA the file contains both the old and the new certificate.
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
        problem = (
            "has an invalid certificate" if b"-----BEGIN" in pem else "contains no certificate"
        )
        raise _refusal(field, f"{path} {problem}") from error
    if pem.count(b"-----BEGIN") != len(_END.findall(pem)):  # the library ignores a truncated one
        raise _refusal(field, f"{path} has a truncated certificate")
    until, since = decisive(spans)
    return Certificates(
        b"".join(each.public_bytes(Encoding.PEM) for each in found),
        int(since.timestamp()),
        int(until.timestamp()),
        key,
    )


def _bytes_of(path: Path, field: str) -> bytes:
    if path.exists() and not path.is_file():  # opening a FIFO would wait for a writer
        raise _refusal(field, f"{path} is not a regular file")
    try:
        with path.open("rb") as file:
            content = file.read(_BYTES_MAX + 1)
    except OSError as error:
        raise _refusal(field, f"cannot read {path}: {reason_of(error)}") from error
    if len(content) > _BYTES_MAX:
        raise _refusal(field, f"{path} is larger than 1 MiB")
    return content


def _refusal(field: str, problem: str) -> StartError:
    return StartError(field, problem, "give a file of PEM certificates")


def _date(time_s: float) -> str:
    return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%d %H:%M} UTC"
