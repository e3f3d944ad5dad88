"""The section ``[remote]`` of the configuration."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import ValidationError

from kvtier.config.section import HOUR, MIB, MS, SECOND, setting
from kvtier.config.tiers import TierSection
from kvtier.core.slow_tier import WriteMode
from kvtier.core.tier_registry import TierName
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.config import Config

__all__ = ["SETTINGS", "RedisConfig", "redis_settings"]


class RedisConfig(TierSection):
    """The remote tier: a Redis or Valkey server that nodes share."""

    place_key: ClassVar[str] = "url"
    switch_key: ClassVar[str] = "url"
    file_backed_key: ClassVar[str] = "url"

    url: str = setting(
        "",
        "URL of the server, with user and password if it requires them: redis://, rediss:// or "
        "unix://; redis+cluster://host:port,host:port for a cluster and "
        "redis+sentinel://host:port,host:port/service for Sentinel (rediss+… with TLS); empty: no "
        "remote tier. It is never logged.",
        why="There is no server to assume.",
        shown="off",
        secret=True,
        example="redis://user:password@host:6379/0",
        pattern=r"^$|^(rediss?|rediss?\+cluster|rediss?\+sentinel|unix)://.",
        repr=False,
    )
    url_file: Path | None = setting(
        None,
        "File with the URL on one line, instead of url: this keeps a password out of the "
        "configuration file and the environment. A changed user or password is used without a "
        "restart. Must not be readable by others.",
        why="A URL without a password needs no protection.",
        shown="none",
        example="/etc/kvtier/redis-url",
    )
    key_prefix: str = setting(
        "kvtier:",
        "Prefix of all keys, so that the server can be shared and an ACL can refer to them.",
        why="Tells other users of the server whose keys these are.",
        min_length=1,
        max_length=64,
    )
    ttl_ns: int = setting(
        24 * HOUR,
        "Time to live of every key, so that a server without nodes empties itself. Reading a key "
        "renews it.",
        why="Most conversations are continued within a day or not at all.",
        live=True,
        ge=SECOND,
        le=365 * 24 * HOUR,
    )
    deadline_ns: int = setting(
        250 * MS,
        "A call fails after this time.",
        why="A slower server takes longer than recomputing a few hundred tokens.",
        ge=MS,
        le=60 * SECOND,
    )
    io_threads: int = setting(
        4,
        "Number of connections, each with one call at a time.",
        why="A few hide the round trips; each costs the server memory.",
        ge=1,
        le=64,
    )
    value_bytes: int = setting(
        MIB,
        "Largest value in the server; a larger block is split into several.",
        why="A server handles nothing else while it transfers a value: this size takes about a "
        "millisecond.",
        ge=64 * 1024,
        le=512 * MIB,
    )
    min_tokens: int = setting(
        256,
        "A lookup asks the server only if at least this many tokens are missing.",
        why="Fewer tokens are computed faster than they are looked up and fetched.",
        live=True,
        ge=0,
        le=2**20,
    )
    max_age_ns: int = setting(
        0,
        "Blocks written longer ago than this are not served, however often they were renewed; 0: "
        "only ttl limits their age.",
        why="Blocks do not get worse with age.",
        live=True,
        ge=0,
        le=3650 * 24 * HOUR,
    )
    tls_ca: Path | None = setting(
        None,
        "CA certificates that the certificate of a rediss:// server must chain to. A changed file "
        "is used without a restart.",
        why="Fits a certificate from a public CA.",
        shown="the system's",
        example="/etc/kvtier/redis-ca.pem",
    )
    seal: Literal["off", "sign", "encrypt"] = setting(
        "off",
        "sign: a value that was not written with one of our keys is never served; encrypt: in "
        "addition nobody else can read it. Both use AES-256-GCM and the first key of "
        "seal.key_file. Set it if others can write to the server.",
        why="It needs keys that someone manages.",
    )
    write: Literal["demote", "second_use", "store"] = setting(
        "second_use",
        "When a block is written; see ssd.write.",
        why="Blocks requested twice on this node are likely to be requested on others.",
    )
    gate: float = setting(
        0.75,
        "With remote.write demote: share of the blocks leaving the CPU tier that is written.",
        why="As ssd.gate.",
        live=True,
        ge=0.0,
        le=1.0,
    )
    in_flight_bytes: int = setting(
        64 * MIB,
        "Bytes that may wait to be written; beyond it, no more blocks are accepted.",
        why="A slow server must not fill the node's memory.",
        live=True,
        ge=MIB,
    )

    def conflicts(self) -> Iterable[ConfigError]:
        """Check that only one of ``url`` and ``url_file`` is set."""
        if self.url and self.url_file is not None:
            yield ConfigError(
                "remote.url_file", "cannot be used together with remote.url", "unset one of them"
            )

    @property
    def is_enabled(self) -> bool:
        """Return whether there is a ``remote.url``."""
        return bool(self.url)

    @property
    def place(self) -> str:
        """Return ``remote.url``."""
        return self.url

    @property
    def write_mode(self) -> WriteMode:
        """Return ``remote.write``."""
        return WriteMode(self.write)

    @property
    def gate_share(self) -> float:
        """Return ``remote.gate``."""
        return self.gate

    @property
    def seal_mode(self) -> str:
        """Return ``remote.seal``."""
        return self.seal

    def with_secret(self, value: str) -> Self:
        """Return the same with another URL. Raises ValueError, which does not repeat it."""
        try:
            RedisConfig(url=value)
        except ValidationError:
            raise ValueError("does not contain the URL of a Redis server") from None
        return self.model_copy(update={"url": value})


def redis_settings(config: "Config") -> RedisConfig:
    """Return the section ``[remote]`` of a configuration, for tools that ask its servers."""
    section = config.tiers[TierName.REMOTE]
    assert isinstance(section, RedisConfig)
    return section


SETTINGS = RedisConfig
"""The section ``[remote]``."""
