"""The configuration as frozen models: one class a section, one field a key.

Rules
-----
* A field's name ends in its unit (``capacity_bytes``, ``lease_ns``); its key in the file does not
  (``capacity = "2GiB"``), because there the value carries the unit. ``key_of`` maps one to other.
* Every field has a default, and its description says what it is for and why that default.
* Checks that need two fields are here; checks that need the machine are in ``cli.preflight``.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from kvtier.config.units import format_size
from kvtier.errors import ConfigError

__all__ = [
    "Address",
    "ClientConfig",
    "Config",
    "CostConfig",
    "CpuConfig",
    "DaemonConfig",
    "EngineConfig",
    "HttpConfig",
    "PolicyConfig",
    "RemoteConfig",
    "RpcConfig",
    "SealConfig",
    "Section",
    "SsdConfig",
    "default_cache_directory",
    "default_socket",
    "key_of",
    "section_models",
]

_MS = 10**6
_SECOND = 10**9
_HOUR = 3600 * _SECOND
_PAGE = 4096
_MIB = 2**20
_GIB = 2**30


def default_socket(environment: Mapping[str, str] = os.environ) -> Path:
    """Return where the daemon listens: the user's run-time directory, or one of its own."""
    if run_time := environment.get("XDG_RUNTIME_DIR"):
        return Path(run_time) / "kvtier" / "kvtier.sock"
    return Path(f"/tmp/kvtier-{os.getuid()}/kvtier.sock")  # noqa: S108 - short, and mode 0700


def default_cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return where the SSD tier keeps its blocks: the user's cache directory."""
    home = environment.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "kvtier"


def key_of(field_name: str) -> str:
    """Return the key that a field has in the file: its name without the unit."""
    return field_name.removesuffix("_bytes").removesuffix("_ns")


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a TCP port to listen on; port 0 lets the kernel choose."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def _shown(text: str, **more: str | bool) -> dict[str, Any]:
    """Describe a default that depends on the machine, or that has no value, for the documents."""
    return {"shown_default": text, **more}


class Section(BaseModel):
    """What the sections share: nothing unknown, nothing coerced, nothing changed afterwards."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class DaemonConfig(Section):
    """The daemon process: one per node."""

    socket: Path = Field(
        default_factory=default_socket,
        json_schema_extra=_shown(
            "$XDG_RUNTIME_DIR/kvtier/kvtier.sock", example="/run/kvtier/kvtier.sock"
        ),
        description="Unix socket on which the daemon serves its clients; without "
        "XDG_RUNTIME_DIR it is /tmp/kvtier-UID/kvtier.sock. At most 101 bytes: Linux takes 107, "
        "and the arena has a socket beside it, with .arena at the end.",
    )
    lease_ns: int = Field(
        default=30 * _SECOND,
        ge=100 * _MS,
        le=_HOUR,
        description="How long a client may hold blocks pinned without renewing. Long enough for "
        "the slowest load, short enough that a client that hangs does not fill the CPU tier.",
    )
    stop_grace_ns: int = Field(
        default=20 * _SECOND,
        ge=_SECOND,
        le=10 * 60 * _SECOND,
        description="Time from SIGTERM to the end of the process, whatever hangs. Keep it below "
        "systemd's TimeoutStopSec and Kubernetes' terminationGracePeriodSeconds.",
    )
    allowed_uids: tuple[Annotated[int, Field(ge=0, le=2**32 - 2)], ...] = Field(
        default=(),
        json_schema_extra=_shown("none", example="[1000, 65532]"),
        description="Users who may attach and operate besides root and the daemon's own; with any, "
        "the sockets are open to all and the kernel says who calls.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The least serious lines that are written to standard error."
    )

    @model_validator(mode="after")
    def _socket_has_a_name(self) -> Self:
        # Other sockets and the lock beside it are named after it.
        if not self.socket.name:
            raise ConfigError(
                "daemon.socket", f"{self.socket} is no file", "name one in a directory of its own"
            )
        return self


class CpuConfig(Section):
    """The CPU tier: the arena that engines map."""

    capacity_bytes: int = Field(
        default=2 * _GIB,
        ge=_MIB,
        description="Memory of the arena, taken at start. The default suits a workstation; a GPU "
        "node gives it most of its free memory.",
    )
    slab_bytes: int = Field(
        default=64 * _MIB,
        ge=64 * 1024,
        le=16 * _GIB,
        multiple_of=_PAGE,
        description="Unit in which the arena is given to block sizes. Large against any block so "
        "that little is wasted at its end; small against the capacity so that sizes can change.",
    )

    @model_validator(mode="after")
    def _slab_fits(self) -> Self:
        _at_most("cpu.slab", self.slab_bytes, "cpu.capacity", self.capacity_bytes)
        return self


class SsdConfig(Section):
    """The SSD tier: segment files in one directory."""

    enabled: bool = Field(default=True, description="Whether there is an SSD tier.")
    directory: Path = Field(
        default_factory=default_cache_directory,
        json_schema_extra=_shown("$XDG_CACHE_HOME/kvtier", example="/var/cache/kvtier"),
        description="Where the segment files are; made if missing (mode 0700), used by one daemon "
        "at a time. Without XDG_CACHE_HOME it is ~/.cache/kvtier.",
    )
    capacity_bytes: int = Field(
        default=20 * _GIB,
        ge=4 * _MIB,
        description="Bytes that all files together may take, metadata included; a hard limit.",
    )
    segment_bytes: int = Field(
        default=256 * _MIB,
        ge=_MIB,
        le=16 * _GIB,
        multiple_of=_PAGE,
        description="Size of one segment file, which is also the unit that is reclaimed. Large "
        "files keep the drive's own clean-up cheap; small ones evict fewer blocks at a time.",
    )
    free_space_floor_bytes: int = Field(
        default=_GIB,
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
    flush_after_ns: int = Field(
        default=300 * _SECOND,
        ge=0,
        le=24 * _HOUR,
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
        le=3650 * 24 * _HOUR,
        description="Blocks written longer ago are not served and are removed; 0: no limit. For "
        "those who must promise how long prompts are kept.",
    )
    scrub_rate_bytes: int = Field(
        default=4 * _MIB,
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
        default=2 * _SECOND,
        ge=10 * _MS,
        le=10 * 60 * _SECOND,
        description="After this a read or write counts as failed. Recomputing a few thousand "
        "tokens takes about as long.",
    )

    @model_validator(mode="after")
    def _two_segments_fit(self) -> Self:
        # One is written while another is reclaimed: with fewer than two the tier stands still.
        _at_most(
            "ssd.segment", self.segment_bytes, "half of ssd.capacity", self.capacity_bytes // 2
        )
        return self


class RemoteConfig(Section):
    """The remote tier: a Redis or Valkey server that nodes share."""

    url: str = Field(
        default="",
        pattern=r"^$|^(rediss?|rediss?\+cluster|rediss?\+sentinel|unix)://.",
        repr=False,
        json_schema_extra=_shown("off", secret=True, example="redis://user:password@host:6379/0"),
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
        default=24 * _HOUR,
        ge=_SECOND,
        le=365 * 24 * _HOUR,
        description="Every key expires after this, so that a server whose nodes are gone empties "
        "itself.",
    )
    deadline_ns: int = Field(
        default=250 * _MS,
        ge=_MS,
        le=60 * _SECOND,
        description="After this a call counts as failed. A server that needs longer is slower than "
        "recomputing a few hundred tokens.",
    )
    io_threads: int = Field(
        default=4, ge=1, le=64, description="Connections, each with one call at a time."
    )
    value_bytes: int = Field(
        default=_MIB,
        ge=64 * 1024,
        le=512 * _MIB,
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
        le=3650 * 24 * _HOUR,
        description="Blocks written longer ago are not served, however often they were renewed; 0: "
        "no limit but ttl.",
    )
    tls_ca: Path | None = Field(
        default=None,
        json_schema_extra=_shown("the system's", example="/etc/kvtier/redis-ca.pem"),
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
        default=64 * _MIB,
        ge=_MIB,
        description="Bytes that may wait to be written; beyond it offers are throttled, because a "
        "slow server must not fill the node's memory.",
    )


class PolicyConfig(Section):
    """What is kept, and how deep into a prompt."""

    eviction: Literal["rd-sec", "rd", "credit-lru", "lru", "s3-fifo"] = Field(
        default="rd-sec",
        description="Which blocks leave the CPU and the SSD tier first. rd: the least predicted "
        "reuse for the time they would be held, learned online; rd-sec: times the seconds that a "
        "hit saves; credit-lru, lru and s3-fifo know only how lately and how often.",
    )
    max_offload_tokens: Literal["auto"] | Annotated[int, Field(ge=0, le=2**31 - 1)] = Field(
        default="auto",
        description="How many leading tokens of a request are kept, rounded down to blocks; 0: "
        "none. auto: as deep as the tokens of its class of traffic came back so far.",
    )
    pin_share: float = Field(
        default=0.25,
        ge=0.0,
        le=0.5,
        description="Share of the CPU tier that pins, priorities, times to live and requests that "
        "wait may keep from being evicted, all together; the rest always serves the others.",
    )


class CostConfig(Section):
    """Whether restoring pays."""

    restore: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="auto: restore as much as ends sooner than computing it, as both were "
        "measured; always: whatever is there; never: nothing, though blocks are still stored.",
    )
    split: bool = Field(
        default=True,
        description="Whether the integrated engine may compute the front of a prompt while the "
        "back is being loaded.",
    )
    guard: bool = Field(
        default=True,
        description="Whether a tier from which restores lately took longer than computing would "
        "have is left alone for a while.",
    )
    wait_max_ns: int = Field(
        default=5 * _SECOND,
        ge=10 * _MS,
        le=10 * 60 * _SECOND,
        description="The longest time a request waits for its blocks, whatever was predicted.",
    )
    probe: Literal["start", "off"] = Field(
        default="start",
        description="Whether each tier is measured when the daemon starts, so that the first "
        "decisions are sane: a few MiB are written and read. What was measured before is kept "
        "with the SSD tier.",
    )


class SealConfig(Section):
    """Keys that protect blocks at rest, in the SSD and the remote tier."""

    key_file: Path | None = Field(
        default=None,
        json_schema_extra=_shown("none", example="/etc/kvtier/keys"),
        description="One key a line: a name and 64 hexadecimal digits. The first one seals, all "
        "of them open: to rotate, put a new line first, send SIGHUP, and take the old one out "
        "once nothing needs it. Must not be readable for others.",
    )


class RpcConfig(Section):
    """The operator's calls over TCP: off unless told otherwise, always with TLS and a token."""

    listen: Address | None = Field(
        default=None,
        json_schema_extra=_shown("off", example="0.0.0.0:9465"),
        description="Host and port for kvtier stat, drop and fsck from elsewhere; empty: the "
        "Unix socket alone.",
    )
    tls_cert: Path | None = Field(
        default=None,
        json_schema_extra=_shown("none", example="/etc/kvtier/tls.crt"),
        description="Certificate chain of the daemon, PEM.",
    )
    tls_key: Path | None = Field(
        default=None,
        json_schema_extra=_shown("none", example="/etc/kvtier/tls.key"),
        description="Its private key, PEM.",
    )
    token_file: Path | None = Field(
        default=None,
        json_schema_extra=_shown("none", example="/etc/kvtier/token"),
        description="File with the token that every call must carry; at least 16 characters.",
    )

    @model_validator(mode="after")
    def _is_protected(self) -> Self:
        for key in ("tls_cert", "tls_key", "token_file"):
            if self.listen is not None and getattr(self, key) is None:
                raise ConfigError(f"rpc.{key}", "is not set, but rpc.listen is", "set both")
        return self


class HttpConfig(Section):
    """The daemon's own HTTP server: health and metrics, nothing else."""

    listen: Address | None = Field(
        default=Address("127.0.0.1", 9464),
        description="Host and port for /healthz, /readyz and /metrics; empty: no such server. "
        "Loopback, because the metrics are not protected.",
    )


class EngineConfig(Section):
    """The integrated engine with its OpenAI-compatible server."""

    model: Path | None = Field(
        default=None,
        json_schema_extra=_shown("none", example="/models/SmolLM2-135M-Instruct"),
        description="Folder with config.json, safetensors and tokenizer, or a GGUF file. Without "
        "one no engine is started.",
    )
    device: str = Field(
        default="cpu",
        pattern=r"^(cpu|cuda|cuda:\d{1,2})$",
        description="cpu, cuda, or one device as cuda:N.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Number format of weights and KV. auto: float32 on cpu, where results are "
        "exact, and bfloat16 on cuda.",
    )
    pool_bytes: int = Field(
        default=_GIB,
        ge=_MIB,
        description="Memory of the engine's KV pool, the GPU tier, taken at start on its device.",
    )
    block_tokens: int = Field(
        default=64,
        ge=1,
        le=4096,
        description="Tokens of a block, the unit that tiers keep. Larger blocks move faster; "
        "smaller ones find more of a shared prefix. Clients that share blocks need the same.",
    )
    engine_block_tokens: int = Field(
        default=16,
        ge=1,
        le=4096,
        description="Tokens of one block of the engine's own pool; a divisor of block_tokens.",
    )
    max_batch_tokens: int = Field(
        default=512,
        ge=1,
        le=2**20,
        description="Tokens of one step. Bounds how long a long prompt holds up those that are "
        "being answered.",
    )
    max_sequences: int = Field(
        default=64,
        ge=1,
        le=4096,
        description="Requests that are computed at once; others wait.",
    )
    listen: Address = Field(
        default=Address("127.0.0.1", 8000),
        description="Host and port of the OpenAI-compatible server. Loopback, because it asks "
        "nobody for a key.",
    )
    served_model_name: str = Field(
        default="",
        json_schema_extra=_shown("the model's own", example="smollm2"),
        description="Name under which the model is served; empty: the name of its folder or file.",
    )
    context_limit: int = Field(
        default=0,
        ge=0,
        le=2**27,
        description="Most tokens of a prompt with its answer; 0: what the model was trained for.",
    )

    tenant_from: Literal["request", "api_key"] = Field(
        default="request",
        description="What separates tenants. request: the cache_salt that a request carries; "
        "api_key: the key it authenticates with, and its cache_salt is ignored, so that nobody "
        "can name another's.",
    )
    api_keys_file: Path | None = Field(
        default=None,
        json_schema_extra=_shown("none", example="/etc/kvtier/api-keys"),
        description="File with one API key a line; requests without one of them are refused. "
        "Without the file nobody is asked for a key unless tenant_from is api_key, which then "
        "takes any.",
    )

    @model_validator(mode="after")
    def _blocks_divide(self) -> Self:
        if self.block_tokens % self.engine_block_tokens:
            raise ConfigError(
                "engine.block_tokens",
                f"{self.block_tokens} is no multiple of engine.engine_block_tokens, "
                f"{self.engine_block_tokens}",
                "make a block a whole number of engine blocks",
            )
        return self


class ClientConfig(Section):
    """How long an engine waits for the daemon before it recomputes."""

    lookup_deadline_ns: int = Field(
        default=250 * _MS,
        ge=_MS,
        le=60 * _SECOND,
        description="A lookup takes about a millisecond; after this the daemon counts as away.",
    )
    load_deadline_ns: int = Field(
        default=5 * _SECOND,
        ge=_MS,
        le=10 * 60 * _SECOND,
        description="After this the blocks that have come are used and the rest is recomputed.",
    )
    store_deadline_ns: int = Field(
        default=5 * _SECOND,
        ge=_MS,
        le=10 * 60 * _SECOND,
        description="After this a store is given up and its engine blocks are free again.",
    )
    reconnect_ns: int = Field(
        default=_SECOND,
        ge=10 * _MS,
        le=10 * 60 * _SECOND,
        description="Pause between attempts to reach a daemon that is away.",
    )


class Config(Section):
    """The whole configuration of a node, and where each value came from."""

    daemon: DaemonConfig = Field(default_factory=DaemonConfig)
    cpu: CpuConfig = Field(default_factory=CpuConfig)
    ssd: SsdConfig = Field(default_factory=SsdConfig)
    remote: RemoteConfig = Field(default_factory=RemoteConfig)
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    cost: CostConfig = Field(default_factory=CostConfig)
    seal: SealConfig = Field(default_factory=SealConfig)
    rpc: RpcConfig = Field(default_factory=RpcConfig)
    http: HttpConfig = Field(default_factory=HttpConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    client: ClientConfig = Field(default_factory=ClientConfig)

    _sources: Mapping[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _keys_are_there(self) -> Self:
        for tier, mode in (("ssd", self.ssd.seal), ("remote", self.remote.seal)):
            if mode != "off" and self.seal.key_file is None:
                raise ConfigError(
                    "seal.key_file",
                    f'is not set, but {tier}.seal is "{mode}"',
                    "name a file of keys",
                )
        return self

    @classmethod
    def from_sections(cls, sections: Mapping[str, Section], sources: Mapping[str, str]) -> Self:
        """Put checked sections together; ``sources`` maps ``section.key`` to where it was set."""
        config = cls.model_validate(dict(sections))
        config._sources = dict(sources)
        return config

    def source_of(self, key: str) -> str:
        """Tell where ``section.key`` was set: a file, a variable, an option, or ``default``."""
        return self._sources.get(key, "default")


def section_models() -> dict[str, type[Section]]:
    """Return the class of each section by its name, in the order of the documents."""
    models: dict[str, type[Section]] = {}
    for name, field in Config.model_fields.items():
        model = field.annotation
        assert isinstance(model, type), f"section {name} has no class"
        assert issubclass(model, Section), f"section {name} is no Section"
        models[name] = model
    return models


def _at_most(field: str, size_bytes: int, limit_name: str, limit_bytes: int) -> None:
    if size_bytes > limit_bytes:
        raise ConfigError(
            field,
            f"{format_size(size_bytes)} is more than {limit_name}, {format_size(limit_bytes)}",
            f"lower {field} or raise {limit_name.removeprefix('half of ')}",
        )
