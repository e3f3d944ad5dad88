"""Credentials of the TCP listener: a certificate, its key, and the tokens of callers.

Each connection uses the current certificate and key, and each call is checked against the current
tokens. Changed files are reloaded; see ``kvtier.secret``.
"""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from kvtier.certificate import Certificates, read_chain
from kvtier.config import RpcConfig
from kvtier.errors import StartError
from kvtier.secret import Secret, read_secret, read_tokens

__all__ = ["Credentials", "Identity"]

_CURVES = (ec.SECP256R1, ec.SECP384R1)
"""Curves that gRPC clients support; with others, or Ed25519, connecting fails."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate with its key."""

    certificate: Certificates
    key: bytes = field(repr=False)

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """Return the pair for gRPC."""
        pair = (self.key, self.certificate.pem)
        return grpc.ssl_server_certificate_configuration([pair])


class Credentials:
    """The credentials in the files of ``config``. Raises StartError for the first invalid file."""

    def __init__(self, config: RpcConfig) -> None:
        certificate, key, tokens = config.tls_cert, config.tls_key, config.token_file
        assert certificate is not None, "the configuration requires them if rpc.listen is set"
        assert key is not None
        assert tokens is not None
        self.identity = Secret(
            "rpc_certificate", lambda: (certificate, key), partial(_identity, certificate, key)
        )
        self._tokens = Secret(
            "rpc_token", lambda: (tokens,), partial(read_tokens, tokens, "rpc.token_file")
        )

    @property
    def secrets(self) -> Sequence[Secret[Identity] | Secret[tuple[str, ...]]]:
        """Return the secrets to reload when files change."""
        return (self.identity, self._tokens)

    def admits(self, shown: str) -> bool:
        """Return whether a caller's token is valid, in constant time."""
        found = [hmac.compare_digest(shown.encode(), one.encode()) for one in self._tokens.value]
        return any(found)

    def for_server(self) -> grpc.ServerCredentials:
        """Return credentials that gRPC fetches before each handshake, on its own thread."""

        def present() -> grpc.ServerCertificateConfiguration:
            return self.identity.value.configuration()

        return grpc.dynamic_ssl_server_credentials(present(), present)


def _identity(certificate: Path, key: Path) -> Identity:
    """Read a certificate and its key, and check that they match; raises StartError."""
    chain = read_chain(certificate, "rpc.tls_cert")
    content = read_secret(key, "rpc.tls_key").encode()
    try:
        own = load_pem_private_key(content, password=None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise StartError(
            "rpc.tls_key", f"{key} is not a private key", "give an unencrypted key in PEM"
        ) from error
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if chain.first_key.public_bytes(*form) != own.public_bytes(*form):
        raise StartError(
            "rpc.tls_key",
            f"{key} is not the key of the first certificate in {certificate}",
            "give the key that belongs to the certificate",
        )
    is_taken = isinstance(own, rsa.RSAPublicKey) or (
        isinstance(own, ec.EllipticCurvePublicKey) and isinstance(own.curve, _CURVES)
    )
    if not is_taken:
        raise StartError(
            "rpc.tls_key", f"gRPC does not support the type of {key}", "use RSA, P-256 or P-384"
        )
    return Identity(chain, content)
