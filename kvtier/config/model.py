"""The configuration as frozen models: one class per section, one field per key.

The sections of the tiers are in ``tiers``, those of the engine in ``engine``, and rules for all
sections in ``section``. Checks that need the machine are in ``cli.preflight``.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, PrivateAttr
from pydantic.fields import FieldInfo

from kvtier.config.engine import ClientConfig, EngineConfig
from kvtier.config.section import (
    HOUR,
    MS,
    SECOND,
    HostNames,
    ListenAddress,
    Section,
    key_of,
    live,
    why,
)
from kvtier.config.tiers import CpuConfig, RemoteConfig, SealConfig, SsdConfig
from kvtier.core.eviction import EVICTION_POLICIES, policy_help
from kvtier.errors import ConfigError

__all__ = [
    "SYSTEM_CONFIG",
    "SYSTEM_SOCKET",
    "ClientConfig",
    "Config",
    "CostConfig",
    "DaemonConfig",
    "EngineConfig",
    "HttpConfig",
    "ListenAddress",
    "PolicyConfig",
    "RpcConfig",
    "all_settings",
    "default_socket",
    "find_socket",
    "section_models",
]


def default_socket(environment: Mapping[str, str] = os.environ) -> Path:
    """Return where the daemon listens: the user's run-time directory, or one of its own."""
    if run_time := environment.get("XDG_RUNTIME_DIR"):
        return Path(run_time) / "kvtier" / "kvtier.sock"
    return Path(f"/tmp/kvtier-{os.getuid()}/kvtier.sock")  # noqa: S108 - short, and mode 0700


class DaemonConfig(Section):
    """The daemon process: one per node."""

    socket: Path = Field(
        default_factory=default_socket,
        json_schema_extra=why(
            "Private to the user, and gone with the machine's next start.",
            shown="$XDG_RUNTIME_DIR/kvtier/kvtier.sock",
            example="/run/kvtier/kvtier.sock",
        ),
        description="Unix socket on which the daemon serves its clients; without "
        "XDG_RUNTIME_DIR it is /tmp/kvtier-UID/kvtier.sock. At most 101 bytes: Linux takes 107, "
        "and the arena has a socket beside it, with .arena at the end.",
    )
    lease_ns: int = Field(
        default=30 * SECOND,
        ge=100 * MS,
        le=HOUR,
        json_schema_extra=live(
            "Long enough for the slowest load, short enough that a client that hangs does not "
            "fill the CPU tier."
        ),
        description="How long a client may hold blocks pinned without renewing. Engines that are "
        "attached keep the lease they were told when they came.",
    )
    stop_grace_ns: int = Field(
        default=20 * SECOND,
        ge=SECOND,
        le=10 * 60 * SECOND,
        json_schema_extra=live("Below the 30 s that Kubernetes gives and the 90 s of systemd."),
        description="Time from SIGTERM to the end of the process, whatever hangs; running requests "
        "get 0.7 of it (0.9 in an engine without a daemon). Keep it below systemd's TimeoutStopSec "
        "and Kubernetes' terminationGracePeriodSeconds.",
    )
    allowed_uids: tuple[Annotated[int, Field(ge=0, le=2**32 - 2)], ...] = Field(
        default=(),
        json_schema_extra=why(
            "Whoever may attach reads every prompt on the node.",
            shown="none",
            example="[1000, 65532]",
        ),
        description="Users who may attach and operate besides root and the daemon's own; with any, "
        "the sockets are open to all and the kernel says who calls.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info",
        json_schema_extra=live("At info an idle daemon writes some lines a day."),
        description="The least serious lines that are written to standard error. An engine takes "
        "it when it starts; one that the daemon starts takes what the daemon was started with.",
    )
    log_format: Literal["text", "json"] = Field(
        default="text",
        json_schema_extra=why("People read it first."),
        description="How a line of the log is written: key=value pairs, or a JSON object for "
        "collectors. The daemon and its engines write the same form.",
    )
    traces: bool = Field(
        default=False,
        json_schema_extra=why("It needs kvtier[otel], and a collector."),
        description="Whether requests are traced by OpenTelemetry; the OTEL_* variables say where "
        "traces go and how many. An engine takes it when it starts.",
    )

    def conflicts(self) -> Iterable[ConfigError]:
        """Check that the socket has a name: others, and the lock beside it, are named after it."""
        if not self.socket.name:
            yield ConfigError(
                "daemon.socket", f"{self.socket} is no file", "name one in a directory of its own"
            )


if TYPE_CHECKING:
    EvictionName = str
else:
    EvictionName = Literal[tuple(EVICTION_POLICIES)]


class PolicyConfig(Section):
    """What is kept, and how deep into a prompt."""

    eviction: EvictionName = Field(
        default=next(iter(EVICTION_POLICIES)),
        json_schema_extra=why("Saved most time on every trace that was tried."),
        description="Which blocks leave the CPU tier first, and the SSD tier unless ssd.eviction "
        "says otherwise. " + policy_help(),
    )
    max_offload_tokens: Literal["auto"] | Annotated[int, Field(ge=0, le=2**31 - 1)] = Field(
        default="auto",
        json_schema_extra=live("No fixed number is right for two kinds of traffic."),
        description="How many leading tokens of a request are kept, rounded down to blocks; 0: "
        "none. auto: as deep as the tokens of its class of traffic came back so far.",
    )
    answers: bool = Field(
        default=True,
        json_schema_extra=live("The next turn of a conversation begins with the last answer."),
        description="Whether blocks with generated tokens are kept. false: only prompts are, as "
        "where the next turn leaves out what was thought; an answer is then kept once it comes "
        "again in a prompt.",
    )
    pin_share: float = Field(
        default=0.25,
        ge=0.0,
        le=0.5,
        json_schema_extra=live("What is kept for some is missing to all others."),
        description="Share of the CPU tier that pins, priorities, times to live and requests that "
        "wait may keep from being evicted, all together; the rest always serves the others. A "
        "smaller one takes back nothing that was promised before.",
    )


class CostConfig(Section):
    """Whether restoring pays."""

    restore: Literal["auto", "always", "never"] = Field(
        default="auto",
        json_schema_extra=live("What was measured here knows better than any fixed rule."),
        description="auto: restore as much as ends sooner than computing it, as both were "
        "measured; always: whatever is there; never: nothing, though blocks are still stored.",
    )
    split: bool = Field(
        default=True,
        json_schema_extra=live("It is done only where it is predicted to end sooner."),
        description="Whether the integrated engine may compute the front of a prompt while the "
        "back is being loaded.",
    )
    guard: bool = Field(
        default=True,
        json_schema_extra=live("A tier that has become slow is noticed by its first victims only."),
        description="Whether a tier from which restores lately took longer than computing would "
        "have is left alone for a while.",
    )
    wait_max_ns: int = Field(
        default=5 * SECOND,
        ge=10 * MS,
        le=10 * 60 * SECOND,
        json_schema_extra=live("Longer than any restore that pays on the machines measured."),
        description="The longest time a request waits for its blocks, whatever was predicted.",
    )
    probe: Literal["start", "off"] = Field(
        default="start",
        json_schema_extra=live("Without it the first decisions are guesses."),
        description="Whether each tier is measured when the daemon starts, so that the first "
        "decisions are sane: a few MiB are written and read. What was measured before is kept "
        "with the SSD tier.",
    )


class RpcConfig(Section):
    """The operator's calls over TCP: off unless told otherwise, always with TLS and a token."""

    listen: ListenAddress | None = Field(
        default=None,
        json_schema_extra=why(
            "Nobody reaches a daemon from elsewhere unless somebody wants it.",
            shown="off",
            example="0.0.0.0:9465",
        ),
        description="Host and port for kvtier stat, drop and fsck from elsewhere; empty: the "
        "Unix socket alone.",
    )
    tls_cert: Path | None = Field(
        default=None,
        json_schema_extra=why(
            "Only the operator has one.", shown="none", example="/etc/kvtier/tls.crt"
        ),
        description="Certificate chain of the daemon, PEM. A new one counts without a restart.",
    )
    tls_key: Path | None = Field(
        default=None,
        json_schema_extra=why(
            "Only the operator has one.", shown="none", example="/etc/kvtier/tls.key"
        ),
        description="Its private key, PEM: RSA, P-256 or P-384.",
    )
    token_file: Path | None = Field(
        default=None,
        json_schema_extra=why(
            "A token that is made up for you would have to be told to you.",
            shown="none",
            example="/etc/kvtier/token",
        ),
        description="File with the token that every call must carry, or with some, one a line; at "
        "least 16 characters each.",
    )

    def conflicts(self) -> Iterable[ConfigError]:
        """Check that what listens is protected."""
        for key in ("tls_cert", "tls_key", "token_file"):
            if self.listen is not None and getattr(self, key) is None:
                yield ConfigError(f"rpc.{key}", "is not set, but rpc.listen is", "set both")


class HttpConfig(Section):
    """The daemon's own HTTP server: health, metrics and the status page, nothing else."""

    listen: ListenAddress | None = Field(
        default=ListenAddress("127.0.0.1", 9464),
        json_schema_extra=why("Loopback, because this port has no authentication."),
        description="Host and port for /healthz, /readyz, /metrics and the status page; empty: no "
        "such server.",
    )
    status_page: bool = Field(
        default=True,
        json_schema_extra=why("On: it is read-only, and shows little that /metrics does not."),
        description="Whether / serves a page that shows what kvtier stat does.",
    )
    allowed_hosts: HostNames = ()


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

    def conflicts(self) -> Iterable[ConfigError]:
        """Check that there are keys for what is to be sealed."""
        for tier, mode in (("ssd", self.ssd.seal), ("remote", self.remote.seal)):
            if mode != "off" and self.seal.key_file is None:
                yield ConfigError(
                    "seal.key_file",
                    f'is not set, but {tier}.seal is "{mode}"',
                    "name a file of keys",
                )

    @classmethod
    def from_sections(cls, sections: Mapping[str, Section], sources: Mapping[str, str]) -> Self:
        """Put checked sections together; ``sources`` maps ``section.key`` to where it was set."""
        config = cls.model_validate(dict(sections))
        config._sources = dict(sources)
        return config

    def with_url(self, url: str, source: str) -> Self:
        """Return the same with another ``remote.url``, and where that was found."""
        config = self.model_copy(update={"remote": self.remote.model_copy(update={"url": url})})
        config._sources = {**self._sources, "remote.url": source}
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


def all_settings() -> Iterator[tuple[str, str, str, FieldInfo]]:
    """Yield each key of the file with its section's name, its field's name and the field."""
    for section, model in section_models().items():
        for name, field in model.model_fields.items():
            yield f"{section}.{key_of(name)}", section, name, field


SYSTEM_SOCKET = Path("/run/kvtier/kvtier.sock")
"""Where it serves; the folder has to be root's, or the daemon's own."""

SYSTEM_CONFIG = Path("/etc/kvtier/kvtier.toml")
"""What it is started with."""


def find_socket(socket: Path, machine: Path = SYSTEM_SOCKET) -> Path:
    """Return where to look for a daemon now: at ``socket``, or else at the machine's.

    That is only meant where nobody named a socket, so that it is the user's, and none is there.
    """
    is_named = socket != default_socket()
    if is_named or os.access(socket, os.F_OK) or not os.access(machine, os.F_OK):
        return socket
    return machine
