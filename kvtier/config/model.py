"""The configuration as frozen models: one class a section, one field a key.

The tiers' sections are in ``tiers``, what all sections follow in ``section``. Checks that need two
fields are here; checks that need the machine are in ``cli.preflight``.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from kvtier.config.section import GIB, HOUR, MIB, MS, SECOND, Section, shown
from kvtier.config.tiers import CpuConfig, RemoteConfig, SealConfig, SsdConfig
from kvtier.errors import ConfigError

__all__ = [
    "Address",
    "ClientConfig",
    "Config",
    "CostConfig",
    "DaemonConfig",
    "EngineConfig",
    "HttpConfig",
    "PolicyConfig",
    "RpcConfig",
    "default_socket",
    "section_models",
]


def default_socket(environment: Mapping[str, str] = os.environ) -> Path:
    """Return where the daemon listens: the user's run-time directory, or one of its own."""
    if run_time := environment.get("XDG_RUNTIME_DIR"):
        return Path(run_time) / "kvtier" / "kvtier.sock"
    return Path(f"/tmp/kvtier-{os.getuid()}/kvtier.sock")  # noqa: S108 - short, and mode 0700


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a TCP port to listen on; port 0 lets the kernel choose."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class DaemonConfig(Section):
    """The daemon process: one per node."""

    socket: Path = Field(
        default_factory=default_socket,
        json_schema_extra=shown(
            "$XDG_RUNTIME_DIR/kvtier/kvtier.sock", example="/run/kvtier/kvtier.sock"
        ),
        description="Unix socket on which the daemon serves its clients; without "
        "XDG_RUNTIME_DIR it is /tmp/kvtier-UID/kvtier.sock. At most 101 bytes: Linux takes 107, "
        "and the arena has a socket beside it, with .arena at the end.",
    )
    lease_ns: int = Field(
        default=30 * SECOND,
        ge=100 * MS,
        le=HOUR,
        description="How long a client may hold blocks pinned without renewing. Long enough for "
        "the slowest load, short enough that a client that hangs does not fill the CPU tier.",
    )
    stop_grace_ns: int = Field(
        default=20 * SECOND,
        ge=SECOND,
        le=10 * 60 * SECOND,
        description="Time from SIGTERM to the end of the process, whatever hangs. Keep it below "
        "systemd's TimeoutStopSec and Kubernetes' terminationGracePeriodSeconds.",
    )
    allowed_uids: tuple[Annotated[int, Field(ge=0, le=2**32 - 2)], ...] = Field(
        default=(),
        json_schema_extra=shown("none", example="[1000, 65532]"),
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


class PolicyConfig(Section):
    """What is kept, and how deep into a prompt."""

    eviction: Literal["rd-sec", "rd", "credit-lru", "lru", "s3-fifo"] = Field(
        default="rd-sec",
        description="Which blocks leave the CPU tier first, and the SSD tier unless ssd.eviction "
        "says otherwise. rd: the least predicted reuse for the time they would be held, learned "
        "online; rd-sec: weighed by the seconds that a hit saves; credit-lru, lru and s3-fifo know "
        "only how lately and how often.",
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
        default=5 * SECOND,
        ge=10 * MS,
        le=10 * 60 * SECOND,
        description="The longest time a request waits for its blocks, whatever was predicted.",
    )
    probe: Literal["start", "off"] = Field(
        default="start",
        description="Whether each tier is measured when the daemon starts, so that the first "
        "decisions are sane: a few MiB are written and read. What was measured before is kept "
        "with the SSD tier.",
    )


class RpcConfig(Section):
    """The operator's calls over TCP: off unless told otherwise, always with TLS and a token."""

    listen: Address | None = Field(
        default=None,
        json_schema_extra=shown("off", example="0.0.0.0:9465"),
        description="Host and port for kvtier stat, drop and fsck from elsewhere; empty: the "
        "Unix socket alone.",
    )
    tls_cert: Path | None = Field(
        default=None,
        json_schema_extra=shown("none", example="/etc/kvtier/tls.crt"),
        description="Certificate chain of the daemon, PEM.",
    )
    tls_key: Path | None = Field(
        default=None,
        json_schema_extra=shown("none", example="/etc/kvtier/tls.key"),
        description="Its private key, PEM.",
    )
    token_file: Path | None = Field(
        default=None,
        json_schema_extra=shown("none", example="/etc/kvtier/token"),
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
        json_schema_extra=shown("none", example="/models/SmolLM2-135M-Instruct"),
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
        default=GIB,
        ge=MIB,
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
        json_schema_extra=shown("the model's own", example="smollm2"),
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
        json_schema_extra=shown("none", example="/etc/kvtier/api-keys"),
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
        default=250 * MS,
        ge=MS,
        le=60 * SECOND,
        description="A lookup takes about a millisecond; after this the daemon counts as away.",
    )
    load_deadline_ns: int = Field(
        default=5 * SECOND,
        ge=MS,
        le=10 * 60 * SECOND,
        description="After this the blocks that have come are used and the rest is recomputed.",
    )
    store_deadline_ns: int = Field(
        default=5 * SECOND,
        ge=MS,
        le=10 * 60 * SECOND,
        description="After this a store is given up and its engine blocks are free again.",
    )
    reconnect_ns: int = Field(
        default=SECOND,
        ge=10 * MS,
        le=10 * 60 * SECOND,
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
