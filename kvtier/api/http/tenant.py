"""Who a client is, and the salt that keeps its blocks apart from all others'.

Where the tenant comes from the API key, the salt is drawn from it and what the request says of a
salt is ignored: nobody can name another tenant, and so cannot ask the clock what that one has sent.
"""

import hashlib
from collections.abc import Set
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from starlette.requests import HTTPConnection

from kvtier.api.http.errors import ApiError, no_key
from kvtier.errors import StartError
from kvtier.secret import Secret, read_secret, secret_lines

__all__ = ["TenantRules", "api_keys", "key_salt"]

_FIELD = "engine.api_keys_file"
_KEY_CHARACTERS_MIN = 16
_SCHEME = "bearer"


def key_salt(key: str) -> str:
    """Return the salt of the tenant that holds an API key; tells nothing of the key."""
    return "api_key:" + _digest(key).hex()


def _digest(key: str) -> bytes:
    return hashlib.sha256(b"kvtier.api_key\0" + key.encode()).digest()


def api_keys(path: Path) -> Secret[Set[bytes]]:
    """Return the digests of the keys in a file, one a line. Raises StartError."""
    return Secret("api_keys", lambda: (path,), partial(_read_keys, path))


def _read_keys(path: Path) -> Set[bytes]:
    digests = set()
    for number, key in secret_lines(read_secret(path, _FIELD)):
        if len(key) < _KEY_CHARACTERS_MIN or not key.isascii() or " " in key or "\t" in key:
            raise StartError(
                _FIELD,
                f"line {number} of {path} is no key",
                f"give one a line, of {_KEY_CHARACTERS_MIN} characters or more without blanks",
            )
        digests.add(_digest(key))
    if not digests:
        raise StartError(_FIELD, f"{path} has no key", "write one: openssl rand -hex 32")
    return frozenset(digests)


@dataclass(frozen=True, slots=True)
class TenantRules:
    """The server's rule: which keys are let in, and what separates tenants.

    ``keys`` None: any key is let in, and none is needed unless the tenant comes from it.
    """

    is_from_key: bool = False
    keys: Secret[Set[bytes]] | None = field(default=None, repr=False)

    def key_of(self, connection: HTTPConnection) -> str:
        """Return the API key of a request, or nothing where none is needed; raises ApiError."""
        if not self.is_from_key and self.keys is None:
            return ""
        scheme, _, key = connection.headers.get("authorization", "").partition(" ")
        key = key.strip()
        if scheme.lower() != _SCHEME or not key:
            raise no_key("there is no API key: send it as Authorization: Bearer KEY")
        # By digest: how long the look takes depends on bits that nobody can steer.
        if self.keys is not None and _digest(key) not in self.keys.value:
            raise no_key("the API key is not known here")
        return key

    def salt_of(self, key: str, cache_salt: str | None) -> str | None:
        """Return the salt of a request's blocks, given its key and what it says itself."""
        return key_salt(key) if self.is_from_key else cache_salt

    def check_scrape(self, connection: HTTPConnection) -> None:
        """Refuse metrics to tenants: sums over all of them tell each about the others."""
        if self.is_from_key and not _is_here(connection):
            raise ApiError(
                "metrics are sums over all tenants and are told on this node alone", status=403
            )


def _is_here(connection: HTTPConnection) -> bool:
    """Tell whether the other end is on this machine; a proxy here passes on whose it is."""
    try:
        address = ip_address(connection.client.host if connection.client else "")
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback
