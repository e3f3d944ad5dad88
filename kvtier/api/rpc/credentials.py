"""What the TCP listener needs: a certificate, its key, and the tokens that callers may show.

Each connection is made with the certificate and the key that count by then, and each call is held
against the tokens that do. Who exchanges their files exchanges them; see ``kvtier.secret``.
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
"""Those that clients of gRPC take; with others, or Ed25519, no connection comes about."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate with its key."""

    certificate: Certificates
    key: bytes = field(repr=False)

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """Return it as gRPC takes it."""
        pair = (self.key, self.certificate.pem)
        return grpc.ssl_server_certificate_configuration([pair])


class Credentials:
    """What the files of ``config`` say, read at once: StartError names the first that won't do."""

    def __init__(self, config: RpcConfig) -> None:
        certificate, key, tokens = config.tls_cert, config.tls_key, config.token_file
        assert certificate is not None, "the configuration demands them where rpc.listen is set"
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
        """Return what has to be read again where files change."""
        return (self.identity, self._tokens)

    def admits(self, shown: str) -> bool:
        """Tell whether a caller's token is one of ours, in a time that does not depend on it."""
        found = [hmac.compare_digest(shown.encode(), one.encode()) for one in self._tokens.value]
        return any(found)

    def for_server(self) -> grpc.ServerCredentials:
        """Return what a server takes: it asks before each handshake, on a thread of its own."""

        def present() -> grpc.ServerCertificateConfiguration:
            return self.identity.value.configuration()

        return grpc.dynamic_ssl_server_credentials(present(), present)


def _identity(certificate: Path, key: Path) -> Identity:
    """Read both, and check that one belongs to the other; raises StartError."""
    chain = read_chain(certificate, "rpc.tls_cert")
    content = read_secret(key, "rpc.tls_key").encode()
    try:
        own = load_pem_private_key(content, password=None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise StartError(
            "rpc.tls_key", f"{key} is no private key", "give one in PEM, not encrypted"
        ) from error
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if chain.first_key.public_bytes(*form) != own.public_bytes(*form):
        raise StartError(
            "rpc.tls_key",
            f"{key} is not the key of the first certificate in {certificate}",
            "give the key that the certificate was made for",
        )
    is_taken = isinstance(own, rsa.RSAPublicKey) or (
        isinstance(own, ec.EllipticCurvePublicKey) and isinstance(own.curve, _CURVES)
    )
    if not is_taken:
        raise StartError(
            "rpc.tls_key", f"{key} is of a kind that gRPC does not take", "use RSA, P-256 or P-384"
        )
    return Identity(chain, content)
