"""Certificates of our own, made when they are needed: a CA, and servers that it vouches for."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

__all__ = ["Authority", "write_secret"]


def write_secret(path: Path, content: str | bytes, mode: int = 0o600) -> Path:
    """Write a file that only this user may read, unless ``mode`` says otherwise."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    path.chmod(mode)
    return path


@dataclass(frozen=True)
class Pair:
    """Where a certificate and its key are."""

    certificate: Path
    key: Path


class Authority:
    """A CA, whose certificate is ``path``."""

    def __init__(self, directory: Path, name: str = "ours") -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._made(self._name, self._key, is_ca=True)
        self.path = directory / f"{name}-ca.pem"
        self.path.write_bytes(certificate.public_bytes(Encoding.PEM))

    def pair(self, name: str) -> Pair:
        """Make a certificate for the loopback address and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._made(subject, key, is_ca=False)
        path = self._directory / f"{name}.crt"
        path.write_bytes(certificate.public_bytes(Encoding.PEM))
        packed = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return Pair(path, write_secret(self._directory / f"{name}.key", packed))

    def _made(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, is_ca: bool
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, SHA256())
        )
