"""What the TCP listener needs: a certificate, its key, and the token that callers must show."""

import hmac
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509 import load_pem_x509_certificates

from kvtier.config import RpcConfig
from kvtier.errors import StartError, reason_of
from kvtier.secret import read_secret, read_token

__all__ = ["Credentials", "read_credentials"]

_CERTIFICATE_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Credentials:
    """One reading of the three files; ``admits`` is the guard's question."""

    certificate: bytes
    key: bytes = field(repr=False)
    token: str = field(repr=False)

    def admits(self, shown: str) -> bool:
        """Tell whether a caller's token is ours, in a time that does not depend on it."""
        return hmac.compare_digest(shown.encode(), self.token.encode())

    def for_server(self) -> grpc.ServerCredentials:
        """Return them as gRPC takes them."""
        return grpc.ssl_server_credentials([(self.key, self.certificate)])


def read_credentials(config: RpcConfig) -> Credentials:
    """Read certificate, key and token; raises StartError naming the first that will not do."""
    assert config.tls_cert is not None, "the configuration demands them where rpc.listen is set"
    assert config.tls_key is not None
    assert config.token_file is not None
    certificate = _read_certificate(config.tls_cert)
    key = read_secret(config.tls_key, "rpc.tls_key").encode()
    _check_pair(certificate, key, config)
    return Credentials(certificate, key, read_token(config.token_file, "rpc.token_file"))


def _read_certificate(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_CERTIFICATE_BYTES_MAX)
    except OSError as error:
        raise StartError(
            "rpc.tls_cert", f"{path} cannot be read: {reason_of(error)}", "give a readable PEM file"
        ) from error


def _check_pair(certificate: bytes, key: bytes, config: RpcConfig) -> None:
    """Check that both files are what they should be, and that one belongs to the other."""
    try:
        first = load_pem_x509_certificates(certificate)[0].public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise StartError(
            "rpc.tls_cert", f"{config.tls_cert} is no certificate", "give a chain in PEM"
        ) from error
    try:
        own = load_pem_private_key(key, password=None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise StartError(
            "rpc.tls_key", f"{config.tls_key} is no private key", "give one in PEM, not encrypted"
        ) from error
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if first.public_bytes(*form) != own.public_bytes(*form):
        raise StartError(
            "rpc.tls_key",
            f"{config.tls_key} is not the key of the first certificate in {config.tls_cert}",
            "give the key that the certificate was made for",
        )
