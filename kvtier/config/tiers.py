"""The tiers' sections, and that of the keys that protect them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from kvtier.config.section import GIB, HOUR, MIB, MS, PAGE, SECOND, Section, at_most, shown

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
        description="Memory of the arena, taken at start. The default suits a workstation; a GPU "
        "node gives it most of its free memory.",
    )
    slab_bytes: int = Field(
        default=64 * MIB,
        ge=64 * 1024,
        le=16 * GIB,
        multiple_of=PAGE,
        description="Unit in which the arena is given to block sizes. Large against any block so "
        "that little is wasted at its end; small against the capacity so that sizes can change.",
    )

    @model_validator(mode="after")
    def _slab_fits(self) -> Self:
        at_most("cpu.slab", self.slab_bytes, "cpu.capacity", self.capacity_bytes)
        return self


class SsdConfig(Section):
    """The SSD tier: segment files in one directory."""

    enabled: bool = Field(default=True, description="Whether there is an SSD tier.")
    directory: Path = Field(
        default_factory=default_cache_directory,
        json_schema_extra=shown("$XDG_CACHE_HOME/kvtier", example="/var/cache/kvtier"),
        description="Where the segment files are; made if missing (mode 0700), used by one daemon "
        "at a time. Without XDG_CACHE_HOME it is ~/.cache/kvtier.",
    )
    capacity_bytes: int = Field(
        default=20 * GIB,
        ge=4 * MIB,
        description="Bytes that all files together may take, metadata included; a hard limit.",
    )
    segment_bytes: int = Field(
        default=256 * MIB,
        ge=MIB,
        le=16 * GIB,
        multiple_of=PAGE,
        description="Size of one segment file, which is also the unit that is reclaimed. Large "
        "files keep the drive's own clean-up cheap; small ones evict fewer blocks at a time.",
    )
    free_space_floor_bytes: int = Field(
        default=GIB,
        ge=0,
        description="Free space of the volume that is left to others; below it nothing is written.",
    )
    free_inodes_floor: int = Field(
        default=1000,
        ge=0,
        description="Free inodes of the volume that are left to others. A segment takes one.",
    )
    durability: Literal["segment", "batch"] = Field(
        default="segment",
        description="What a power loss may take: segment: the blocks since the last full segment; "
        "batch: none that counts as written, for a sync each. A killed process loses none in "
        "either.",
    )
    write: Literal["demote", "second_use", "store"] = Field(
        default="demote",
        description="When a block is written. demote: when the CPU tier is about to let it go and "
        "its predicted reuse is in the best share (ssd.gate); second_use: once it is asked for a "
        "second time; store: at once, whatever it is worth.",
    )
    gate: float = Field(
        default=0.75,
        ge=0.0,
        le=1.0,
        description="With ssd.write demote: share of what leaves the CPU tier that is written. A "
        "write budget lowers it. 0.75 writes a fifth less than everything and costs hardly a hit.",
    )
    eviction: Literal["auto", "rd-sec", "rd", "lru"] = Field(
        default="auto",
        description="Which blocks leave the SSD tier first, as policy.eviction says it for the "
        "CPU tier. auto: the same as there; lru where that is credit-lru or s3-fifo, which the "
        "SSD tier has not.",
    )
    flush_after_ns: int = Field(
        default=300 * SECOND,
        ge=0,
        le=24 * HOUR,
        description="With ssd.write demote: what has been in the CPU tier for so long is written "
        "as well, if the gate takes it, so that a crash does not lose it; 0: never.",
    )
    write_budget_bytes: int = Field(
        default=0,
        ge=0,
        description="Bytes a day that may be written to the drive, moves and metadata included, "
        "as a token bucket of one day; 0: no limit. A drive's endurance divided by its days.",
    )
    max_age_ns: int = Field(
        default=0,
        ge=0,
        le=3650 * 24 * HOUR,
        description="Blocks written longer ago are not served and are removed; 0: no limit. For "
        "those who must promise how long prompts are kept.",
    )
    scrub_rate_bytes: int = Field(
        default=4 * MIB,
        ge=0,
        description="Bytes a second that are read in the background to find damaged blocks before "
        "they are asked for; 0: none. 4MiB/s read 337 GiB a day.",
    )
    seal: Literal["off", "encrypt"] = Field(
        default="off",
        description="Whether blocks are encrypted at rest, with AES-256-GCM and the first key of "
        "seal.key_file. KV can be turned back into text.",
    )
    direct_io: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Whether to go around the page cache. auto: where the file system can, so that "
        "blocks are not kept in memory twice.",
    )
    io_threads: int = Field(
        default=4,
        ge=1,
        le=64,
        description="Reads and writes in flight. A drive needs a few for its full bandwidth; more "
        "only lengthen the queue.",
    )
    deadline_ns: int = Field(
        default=2 * SECOND,
        ge=10 * MS,
        le=10 * 60 * SECOND,
        description="After this a read or write counts as failed. Recomputing a few thousand "
        "tokens takes about as long.",
    )

    @model_validator(mode="after")
    def _two_segments_fit(self) -> Self:
        # One is written while another is reclaimed: with fewer than two the tier stands still.
        at_most("ssd.segment", self.segment_bytes, "half of ssd.capacity", self.capacity_bytes // 2)
        return self


class RemoteConfig(Section):
    """The remote tier: a Redis or Valkey server that nodes share."""

    url: str = Field(
        default="",
        pattern=r"^$|^(rediss?|rediss?\+cluster|rediss?\+sentinel|unix)://.",
        repr=False,
        json_schema_extra=shown("off", secret=True, example="redis://user:password@host:6379/0"),
        description="redis://, rediss:// or unix:// URL of the server, with user and password "
        "where it wants them; redis+cluster://host:port,host:port for a cluster and "
        "redis+sentinel://host:port,host:port/service for Sentinel (rediss+… with TLS); empty: no "
        "remote tier. It is never logged.",
    )
    key_prefix: str = Field(
        default="kvtier:",
        min_length=1,
        max_length=64,
        description="Prefix of all keys, so that the server can be shared and an ACL can name it.",
    )
    ttl_ns: int = Field(
        default=24 * HOUR,
        ge=SECOND,
        le=365 * 24 * HOUR,
        description="Every key expires after this, so that a server whose nodes are gone empties "
        "itself.",
    )
    deadline_ns: int = Field(
        default=250 * MS,
        ge=MS,
        le=60 * SECOND,
        description="After this a call counts as failed. A server that needs longer is slower than "
        "recomputing a few hundred tokens.",
    )
    io_threads: int = Field(
        default=4, ge=1, le=64, description="Connections, each with one call at a time."
    )
    value_bytes: int = Field(
        default=MIB,
        ge=64 * 1024,
        le=512 * MIB,
        description="Largest value in the server; a larger block takes several. While a server "
        "moves one value it serves nobody else: 1 MiB takes it about a millisecond.",
    )
    min_tokens: int = Field(
        default=256,
        ge=0,
        le=2**20,
        description="A lookup asks the server only where at least so many tokens are missing. "
        "Fewer are computed sooner than they are asked for and fetched.",
    )
    max_age_ns: int = Field(
        default=0,
        ge=0,
        le=3650 * 24 * HOUR,
        description="Blocks written longer ago are not served, however often they were renewed; 0: "
        "no limit but ttl.",
    )
    tls_ca: Path | None = Field(
        default=None,
        json_schema_extra=shown("the system's", example="/etc/kvtier/redis-ca.pem"),
        description="Certificates that a rediss:// server's own must descend from.",
    )
    seal: Literal["off", "sign", "encrypt"] = Field(
        default="off",
        description="sign: a value that was not written with one of our keys is never served; "
        "encrypt: nor can it be read. Both with AES-256-GCM and the first key of seal.key_file. "
        "Set it wherever others can write to the server.",
    )
    write: Literal["demote", "second_use", "store"] = Field(
        default="second_use",
        description="When a block is written; see ssd.write. What was asked for twice here is "
        "what other nodes will ask for.",
    )
    gate: float = Field(
        default=0.75,
        ge=0.0,
        le=1.0,
        description="With remote.write demote: share of what leaves the CPU tier that is written.",
    )
    in_flight_bytes: int = Field(
        default=64 * MIB,
        ge=MIB,
        description="Bytes that may wait to be written; beyond it offers are throttled, because a "
        "slow server must not fill the node's memory.",
    )


class SealConfig(Section):
    """Keys that protect blocks at rest, in the SSD and the remote tier."""

    key_file: Path | None = Field(
        default=None,
        json_schema_extra=shown("none", example="/etc/kvtier/keys"),
        description="One key a line: a name and 64 hexadecimal digits. The first one seals, all "
        "of them open: to rotate, put a new line first, send SIGHUP, and take the old one out "
        "once nothing needs it. Must not be readable for others.",
    )
