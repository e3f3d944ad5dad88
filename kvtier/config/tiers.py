"""Sections of the tiers, and of the keys that encrypt their blocks."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from kvtier.config.section import GIB, HOUR, MIB, MS, PAGE, SECOND, Section, at_most, setting
from kvtier.core.eviction import EVICTION_POLICIES
from kvtier.errors import ConfigError, StartError
from kvtier.secret import read_secret, secret_lines

__all__ = [
    "CpuConfig",
    "RemoteConfig",
    "SealConfig",
    "SsdConfig",
    "default_cache_directory",
    "read_url",
]


def default_cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the default directory of the SSD tier: in the user's cache directory."""
    home = environment.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "kvtier"


class CpuConfig(Section):
    """The CPU tier: shared memory that engines map."""

    capacity_bytes: int = setting(
        2 * GIB,
        "Memory of the tier, allocated at start.",
        why="Fits a workstation; on a GPU node use most of the free memory.",
        ge=MIB,
    )
    slab_bytes: int = setting(
        64 * MIB,
        "Unit in which memory is assigned to block sizes.",
        why="Large enough that little is wasted at the end of a slab, and small enough that memory "
        "can move between block sizes.",
        ge=64 * 1024,
        le=16 * GIB,
        multiple_of=PAGE,
    )

    def conflicts(self) -> Iterable[ConfigError]:
        """Check that a slab fits into the tier."""
        return at_most("cpu.slab", self.slab_bytes, "cpu.capacity", self.capacity_bytes)


if TYPE_CHECKING:
    SsdEvictionName = str
else:
    _RANKED = [name for name, policy in EVICTION_POLICIES.items() if policy.is_ranked]
    SsdEvictionName = Literal[("auto", *_RANKED, "lru")]


class SsdConfig(Section):
    """The SSD tier: segment files in one directory."""

    enabled: bool = setting(
        True,
        "Whether there is an SSD tier.",
        why="It keeps blocks across restarts.",
    )
    required: bool = setting(
        False,
        "Whether the daemon refuses to start without this tier. false: it starts without the tier "
        "and opens it once the directory can be used; on a volume with less space than "
        "ssd.capacity the tier uses the space that is available.",
        why="A cache without its disk is better than no cache.",
    )
    directory: Path = setting(
        None,
        "Directory of the segment files. It is created if missing (mode 0700), and used by one "
        "daemon at a time. Without XDG_CACHE_HOME it is ~/.cache/kvtier.",
        why="The user's directory for files that can be recreated.",
        shown="$XDG_CACHE_HOME/kvtier",
        example="/var/cache/kvtier",
        default_factory=default_cache_directory,
    )
    capacity_bytes: int = setting(
        20 * GIB,
        "Total size of all files, including metadata; a hard limit.",
        why="Fits a workstation; `kvtier plan` computes what pays off on a node.",
        ge=4 * MIB,
    )
    segment_bytes: int = setting(
        256 * MIB,
        "Size of a segment file, which is also the unit of reclaiming.",
        why="Large files keep the drive's garbage collection cheap; small ones evict fewer blocks "
        "at a time.",
        ge=MIB,
        le=16 * GIB,
        multiple_of=PAGE,
    )
    free_space_floor_bytes: int = setting(
        GIB,
        "Free space to leave on the volume; below it nothing is written.",
        why="A full volume would break other programs and their logs.",
        live=True,
        ge=0,
    )
    free_inodes_floor: int = setting(
        1000,
        "Free inodes to leave on the volume. A segment takes one.",
        why="Other programs can still create files until someone has a look.",
        live=True,
        ge=0,
    )
    keep: bool = setting(
        True,
        "Whether blocks outlive the daemon. false: the tier is emptied when the daemon stops or "
        "the tier is detached, and after a crash at the next start.",
        why="Finding the blocks again after a restart is the purpose of the tier.",
    )
    durability: Literal["segment", "batch"] = setting(
        "segment",
        "What a power failure may lose. segment: the blocks since the last full segment; batch: "
        "nothing that was reported as written, at the cost of a sync per batch. A killed process "
        "loses nothing in either mode.",
        why="Lost blocks can be recomputed, but every sync costs time.",
    )
    write: Literal["demote", "second_use", "store"] = setting(
        "demote",
        "When a block is written. demote: when the CPU tier is about to evict it and its predicted "
        "reuse is in the best share (ssd.gate); second_use: when it is requested for the second "
        "time; store: immediately.",
        why="Most blocks are never used again, and every write wears the drive.",
    )
    gate: float = setting(
        0.75,
        "With ssd.write demote: share of the blocks leaving the CPU tier that is written. A write "
        "budget lowers it.",
        why="Saves a fifth of the writes and loses hardly any hits.",
        live=True,
        ge=0.0,
        le=1.0,
    )
    eviction: SsdEvictionName = setting(
        "auto",
        "Which blocks are evicted from the SSD tier first; see policy.eviction. auto: the policy "
        "of the CPU tier if it ranks blocks by predicted reuse, else lru.",
        why="A policy that suits one tier usually suits the other.",
    )
    flush_after_ns: int = setting(
        300 * SECOND,
        "With ssd.write demote: blocks that have been in the CPU tier for this long are written "
        "too, if the gate accepts them, so that a crash does not lose them; 0: never.",
        why="A crash then loses at most five minutes of work.",
        live=True,
        ge=0,
        le=24 * HOUR,
    )
    write_budget_bytes: int = setting(
        0,
        "Bytes per day that may be written to the drive, including relocated blocks and metadata, "
        "as a token bucket of one day; 0: no limit. Set it to the drive's rated endurance divided "
        "by its lifetime in days.",
        why="Only the operator knows the drive; until it is set, ssd.gate limits the writes.",
        live=True,
        ge=0,
    )
    max_age_ns: int = setting(
        0,
        "Blocks older than this are not served and are removed; 0: no limit. For operators who "
        "must limit how long prompts are stored.",
        why="Blocks do not get worse with age.",
        live=True,
        ge=0,
        le=3650 * 24 * HOUR,
    )
    scrub_rate_bytes: int = setting(
        4 * MIB,
        "Bytes per second that are read in the background to find damaged blocks before they are "
        "requested; 0: none.",
        why="That is 337 GiB a day, which no drive notices.",
        live=True,
        ge=0,
    )
    seal: Literal["off", "encrypt"] = setting(
        "off",
        "Whether blocks are encrypted at rest, with AES-256-GCM and the first key of "
        "seal.key_file. Without encryption, prompts can be reconstructed from the blocks.",
        why="Encryption needs keys that someone manages.",
    )
    direct_io: Literal["auto", "on", "off"] = setting(
        "auto",
        "Whether to bypass the page cache. auto: if the file system supports it.",
        why="With the page cache, blocks would be in memory twice.",
    )
    io_threads: int = setting(
        4,
        "Number of concurrent reads and writes.",
        why="A drive needs a few for its full bandwidth; more only lengthen the queue.",
        ge=1,
        le=64,
    )
    deadline_ns: int = setting(
        2 * SECOND,
        "A read or write fails after this time, plus the time to transfer its bytes.",
        why="Recomputing a few thousand tokens takes about as long.",
        live=True,
        ge=10 * MS,
        le=10 * 60 * SECOND,
    )

    def conflicts(self) -> Iterable[ConfigError]:
        """Check that two segments fit: one is written while another is reclaimed."""
        half_bytes = self.capacity_bytes // 2
        return at_most("ssd.segment", self.segment_bytes, "half of ssd.capacity", half_bytes)


class RemoteConfig(Section):
    """The remote tier: a Redis or Valkey server that nodes share."""

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


class SealConfig(Section):
    """Keys that protect blocks at rest, in the SSD and the remote tier."""

    key_file: Path | None = setting(
        None,
        "File of keys, one per line: a name and 64 hexadecimal digits. The first key encrypts, all "
        "of them decrypt. To rotate keys, insert a new first line, and remove the old line once "
        "no stored block needs it. Must not be readable by others.",
        why="Only the operator can provide keys.",
        shown="none",
        example="/etc/kvtier/keys",
    )


def read_url(path: Path) -> str:
    """Return the URL in a ``remote.url_file``. Raises ConfigError, which never contains the URL."""
    field, remedy = "remote.url_file", "write the URL on one line, as in remote.url"
    try:
        lines = [line for _, line in secret_lines(read_secret(path, field))]
    except StartError as error:
        raise ConfigError(error.field, error.problem, error.remedy) from None
    if len(lines) != 1:
        raise ConfigError(field, f"{path} must have exactly one line, not {len(lines)}", remedy)
    try:
        RemoteConfig(url=lines[0])
    except ValidationError:  # its message would contain the URL
        problem = f"{path} does not contain the URL of a Redis server"
        raise ConfigError(field, problem, remedy) from None
    return lines[0]
