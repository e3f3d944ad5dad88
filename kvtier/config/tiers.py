"""The tiers' sections, and that of the keys that protect them."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from kvtier.config.section import GIB, HOUR, MIB, MS, PAGE, SECOND, Section, above, live, why
from kvtier.core.eviction import EVICTION_POLICIES
from kvtier.errors import ConfigError

__all__ = ["CpuConfig", "RemoteConfig", "SealConfig", "SsdConfig", "default_cache_directory"]


def default_cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return where the SSD tier keeps its blocks: the user's cache directory."""
    home = environment.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "kvtier"


class CpuConfig(Section):
    """The CPU tier: the arena that engines map."""

    capacity_bytes: int = Field(
        default=2 * GIB,
        ge=MIB,
        json_schema_extra=why("Fits a workstation; a GPU node gives it most of its free memory."),
        description="Memory of the arena, taken at start.",
    )
    slab_bytes: int = Field(
        default=64 * MIB,
        ge=64 * 1024,
        le=16 * GIB,
        multiple_of=PAGE,
        json_schema_extra=why(
            "Large against any block so that little is wasted at its end; small against the "
            "capacity so that sizes can change."
        ),
        description="Unit in which the arena is given to block sizes.",
    )

    def conflicts(self) -> Iterable[ConfigError]:
        """Check that a slab fits."""
        return above("cpu.slab", self.slab_bytes, "cpu.capacity", self.capacity_bytes)


if TYPE_CHECKING:
    SsdEvictionName = str
else:
    _RANKED = [name for name, policy in EVICTION_POLICIES.items() if policy.is_ranked]
    SsdEvictionName = Literal[("auto", *_RANKED, "lru")]


class SsdConfig(Section):
    """The SSD tier: segment files in one directory."""

    enabled: bool = Field(
        default=True,
        json_schema_extra=why("It keeps blocks across restarts."),
        description="Whether there is an SSD tier.",
    )
    required: bool = Field(
        default=False,
        json_schema_extra=why("A cache without its disk is better than no cache."),
        description="Whether the daemon refuses to start without this tier. false: the daemon "
        "serves without the tier while the directory cannot be used, and opens it as soon as it "
        "can; on a volume with less room than ssd.capacity it uses the room there is.",
    )
    directory: Path = Field(
        default_factory=default_cache_directory,
        json_schema_extra=why(
            "Where a user's programs keep what they can make again.",
            shown="$XDG_CACHE_HOME/kvtier",
            example="/var/cache/kvtier",
        ),
        description="Where the segment files are; made if missing (mode 0700), used by one daemon "
        "at a time. Without XDG_CACHE_HOME it is ~/.cache/kvtier.",
    )
    capacity_bytes: int = Field(
        default=20 * GIB,
        ge=4 * MIB,
        json_schema_extra=why("Fits a workstation; `kvtier plan` says what pays on a node."),
        description="Bytes that all files together may take, metadata included; a hard limit.",
    )
    segment_bytes: int = Field(
        default=256 * MIB,
        ge=MIB,
        le=16 * GIB,
        multiple_of=PAGE,
        json_schema_extra=why(
            "Large files keep the drive's own clean-up cheap; small ones evict fewer blocks at a "
            "time."
        ),
        description="Size of one segment file, which is also the unit that is reclaimed.",
    )
    free_space_floor_bytes: int = Field(
        default=GIB,
        ge=0,
        json_schema_extra=live("A full volume would stop others, logs among them."),
        description="Free space of the volume that is left to others; below it nothing is written.",
    )
    free_inodes_floor: int = Field(
        default=1000,
        ge=0,
        json_schema_extra=live("Others can make files for a while before somebody must look."),
        description="Free inodes of the volume that are left to others. A segment takes one.",
    )
    keep: bool = Field(
        default=True,
        json_schema_extra=why("A restart that finds its blocks again is what the tier is for."),
        description="Whether blocks outlive the daemon. false: the tier is emptied when the daemon "
        "stops or the tier is detached, and after a crash by the next start.",
    )
    durability: Literal["segment", "batch"] = Field(
        default="segment",
        json_schema_extra=why("What a power loss takes can be computed again; syncs cost always."),
        description="What a power loss may take: segment: the blocks since the last full segment; "
        "batch: none that counts as written, for a sync each. A killed process loses none in "
        "either.",
    )
    write: Literal["demote", "second_use", "store"] = Field(
        default="demote",
        json_schema_extra=why("Most blocks never come back, and each write wears the drive."),
        description="When a block is written. demote: when the CPU tier is about to let it go and "
        "its predicted reuse is in the best share (ssd.gate); second_use: once it is asked for a "
        "second time; store: at once, whatever it is worth.",
    )
    gate: float = Field(
        default=0.75,
        ge=0.0,
        le=1.0,
        json_schema_extra=live("Writes a fifth less than everything and costs hardly a hit."),
        description="With ssd.write demote: share of what leaves the CPU tier that is written. A "
        "write budget lowers it.",
    )
    eviction: SsdEvictionName = Field(
        default="auto",
        json_schema_extra=why("What is right for one tier mostly is for the other."),
        description="Which blocks leave the SSD tier first, as policy.eviction says it for the "
        "CPU tier. auto: the same as there if that is ranked by predicted reuse, else lru.",
    )
    flush_after_ns: int = Field(
        default=300 * SECOND,
        ge=0,
        le=24 * HOUR,
        json_schema_extra=live("What a crash takes is five minutes' work at most."),
        description="With ssd.write demote: what has been in the CPU tier for so long is written "
        "as well, if the gate takes it, so that a crash does not lose it; 0: never.",
    )
    write_budget_bytes: int = Field(
        default=0,
        ge=0,
        json_schema_extra=live("Only the operator knows the drive; ssd.gate spares it meanwhile."),
        description="Bytes a day that may be written to the drive, moves and metadata included, "
        "as a token bucket of one day; 0: no limit. Set it to the drive's endurance divided by its "
        "days.",
    )
    max_age_ns: int = Field(
        default=0,
        ge=0,
        le=3650 * 24 * HOUR,
        json_schema_extra=live("Age alone makes no block worse."),
        description="Blocks written longer ago are not served and are removed; 0: no limit. For "
        "those who must promise how long prompts are kept.",
    )
    scrub_rate_bytes: int = Field(
        default=4 * MIB,
        ge=0,
        json_schema_extra=live("Reads 337 GiB a day, which no drive feels."),
        description="Bytes a second that are read in the background to find damaged blocks before "
        "they are asked for; 0: none.",
    )
    seal: Literal["off", "encrypt"] = Field(
        default="off",
        json_schema_extra=why("It needs keys that somebody keeps."),
        description="Whether blocks are encrypted at rest, with AES-256-GCM and the first key of "
        "seal.key_file. KV can be turned back into text.",
    )
    direct_io: Literal["auto", "on", "off"] = Field(
        default="auto",
        json_schema_extra=why("Through the page cache blocks would be in memory twice."),
        description="Whether to go around the page cache. auto: where the file system can.",
    )
    io_threads: int = Field(
        default=4,
        ge=1,
        le=64,
        json_schema_extra=why(
            "A drive needs a few for its full bandwidth; more only lengthen the queue."
        ),
        description="Reads and writes in flight.",
    )
    deadline_ns: int = Field(
        default=2 * SECOND,
        ge=10 * MS,
        le=10 * 60 * SECOND,
        json_schema_extra=live("Recomputing a few thousand tokens takes about as long."),
        description="After this, and the time for its bytes, a read or write counts as failed.",
    )

    def conflicts(self) -> Iterable[ConfigError]:
        """Check that two segments fit: one is written while another is reclaimed."""
        half_bytes = self.capacity_bytes // 2
        return above("ssd.segment", self.segment_bytes, "half of ssd.capacity", half_bytes)


class RemoteConfig(Section):
    """The remote tier: a Redis or Valkey server that nodes share."""

    url: str = Field(
        default="",
        pattern=r"^$|^(rediss?|rediss?\+cluster|rediss?\+sentinel|unix)://.",
        repr=False,
        json_schema_extra=why(
            "Only the operator knows a server.",
            shown="off",
            secret=True,
            example="redis://user:password@host:6379/0",
        ),
        description="redis://, rediss:// or unix:// URL of the server, with user and password "
        "where it wants them; redis+cluster://host:port,host:port for a cluster and "
        "redis+sentinel://host:port,host:port/service for Sentinel (rediss+… with TLS); empty: no "
        "remote tier. It is never logged.",
    )
    url_file: Path | None = Field(
        default=None,
        json_schema_extra=why(
            "A URL without a password may stand in the open.",
            shown="none",
            example="/etc/kvtier/redis-url",
        ),
        description="File with the URL on one line, instead of url: then a password is neither in "
        "this file nor in the environment. Another login in it counts without a restart. Must not "
        "be readable for others.",
    )
    key_prefix: str = Field(
        default="kvtier:",
        min_length=1,
        max_length=64,
        json_schema_extra=why("Says to others who share the server whose keys these are."),
        description="Prefix of all keys, so that the server can be shared and an ACL can name it.",
    )
    ttl_ns: int = Field(
        default=24 * HOUR,
        ge=SECOND,
        le=365 * 24 * HOUR,
        json_schema_extra=live("A conversation is taken up again within a day, or hardly ever."),
        description="Every key expires after this, so that a server whose nodes are gone empties "
        "itself. What is asked for is renewed.",
    )
    deadline_ns: int = Field(
        default=250 * MS,
        ge=MS,
        le=60 * SECOND,
        json_schema_extra=why(
            "A server that needs longer is slower than recomputing a few hundred tokens."
        ),
        description="After this a call counts as failed.",
    )
    io_threads: int = Field(
        default=4,
        ge=1,
        le=64,
        json_schema_extra=why("A few hide the way there and back; each costs the server memory."),
        description="Connections, each with one call at a time.",
    )
    value_bytes: int = Field(
        default=MIB,
        ge=64 * 1024,
        le=512 * MIB,
        json_schema_extra=why(
            "While a server moves one value it serves nobody else: this takes it about a "
            "millisecond."
        ),
        description="Largest value in the server; a larger block takes several.",
    )
    min_tokens: int = Field(
        default=256,
        ge=0,
        le=2**20,
        json_schema_extra=live("Fewer are computed sooner than they are asked for and fetched."),
        description="A lookup asks the server only where at least so many tokens are missing.",
    )
    max_age_ns: int = Field(
        default=0,
        ge=0,
        le=3650 * 24 * HOUR,
        json_schema_extra=live("Age alone makes no block worse."),
        description="Blocks written longer ago are not served, however often they were renewed; 0: "
        "no limit but ttl.",
    )
    tls_ca: Path | None = Field(
        default=None,
        json_schema_extra=why(
            "Right for a certificate that was bought.",
            shown="the system's",
            example="/etc/kvtier/redis-ca.pem",
        ),
        description="Certificates that a rediss:// server's own must descend from. Others in the "
        "file count without a restart.",
    )
    seal: Literal["off", "sign", "encrypt"] = Field(
        default="off",
        json_schema_extra=why("It needs keys that somebody keeps."),
        description="sign: a value that was not written with one of our keys is never served; "
        "encrypt: nor can it be read. Both with AES-256-GCM and the first key of seal.key_file. "
        "Set it wherever others can write to the server.",
    )
    write: Literal["demote", "second_use", "store"] = Field(
        default="second_use",
        json_schema_extra=why("What was asked for twice here is what other nodes will ask for."),
        description="When a block is written; see ssd.write.",
    )
    gate: float = Field(
        default=0.75,
        ge=0.0,
        le=1.0,
        json_schema_extra=live("As ssd.gate."),
        description="With remote.write demote: share of what leaves the CPU tier that is written.",
    )
    in_flight_bytes: int = Field(
        default=64 * MIB,
        ge=MIB,
        json_schema_extra=live("A slow server must not fill the node's memory."),
        description="Bytes that may wait to be written; beyond it offers are throttled.",
    )

    def conflicts(self) -> Iterable[ConfigError]:
        """Check that there is one URL."""
        if self.url and self.url_file is not None:
            yield ConfigError("remote.url_file", "is set, and so is remote.url", "set one of them")


class SealConfig(Section):
    """Keys that protect blocks at rest, in the SSD and the remote tier."""

    key_file: Path | None = Field(
        default=None,
        json_schema_extra=why(
            "Only the operator has keys.", shown="none", example="/etc/kvtier/keys"
        ),
        description="One key a line: a name and 64 hexadecimal digits. The first one seals, all "
        "of them open: to rotate, put a new line first, and take the old one out once nothing "
        "needs it. Must not be readable for others.",
    )
