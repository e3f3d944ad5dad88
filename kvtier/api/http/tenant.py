"""Authenticates clients, and derives the salt that separates the blocks of tenants.

If tenants are identified by API key, the salt is derived from the key, and the request's own salt
is ignored. So a client cannot use another tenant's salt to find out its prompts by timing.
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
    """Return the salt of an API key's tenant; it does not reveal the key."""
    return "api_key:" + _digest(key).hex()


def _digest(key: str) -> bytes:
    return hashlib.sha256(b"kvtier.api_key\0" + key.encode()).digest()


def api_keys(path: Path) -> Secret[Set[bytes]]:
    """Return the digests of the API keys in a file. Raises StartError."""
    return Secret("api_keys", lambda: (path,), partial(_read_keys, path))


def _read_keys(path: Path) -> Set[bytes]:
    digests = set()
    for number, key in secret_lines(read_secret(path, _FIELD)):
        if len(key) < _KEY_CHARACTERS_MIN or not key.isascii() or " " in key or "\t" in key:
            raise StartError(
                _FIELD,
                f"line {number} of {path} is not a valid key",
                f"use at least {_KEY_CHARACTERS_MIN} ASCII characters without blanks",
            )
        digests.add(_digest(key))
    if not digests:
        raise StartError(_FIELD, f"{path} contains no key", "create one: openssl rand -hex 32")
    return frozenset(digests)


@dataclass(frozen=True, slots=True)
class TenantRules:
    """Rules for API keys and tenants.

    If ``keys`` is None, any key is accepted, and one is required only if it identifies the tenant.
    """

    is_from_key: bool = False
    keys: Secret[Set[bytes]] | None = field(default=None, repr=False)

    def key_of(self, connection: HTTPConnection) -> str:
        """Return the API key of a request, or "" if none is required; raises ApiError."""
        if not self.is_from_key and self.keys is None:
            return ""
        scheme, _, key = connection.headers.get("authorization", "").partition(" ")
        key = key.strip()
        if scheme.lower() != _SCHEME or not key:
            raise no_key("missing API key; send it as Authorization: Bearer KEY")
        # By digest, so that the time of the lookup reveals nothing about the keys.
        if self.keys is not None and _digest(key) not in self.keys.value:
            raise no_key("invalid API key")
        return key

    def salt_of(self, key: str, cache_salt: str | None) -> str | None:
        """Return the salt of a request's blocks, from its key or its own ``cache_salt``."""
        return key_salt(key) if self.is_from_key else cache_salt

    def check_scrape(self, connection: HTTPConnection) -> None:
        """Raise ApiError if a tenant requests metrics, which would reveal the traffic of others."""
        if self.is_from_key and not _is_here(connection):
            raise ApiError(
                "metrics cover all tenants and are available only on this node", status=403
            )


def _is_here(connection: HTTPConnection) -> bool:
    """Return whether the client is on this machine; a local proxy passes on its client."""
    try:
        address = ip_address(connection.client.host if connection.client else "")
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback
