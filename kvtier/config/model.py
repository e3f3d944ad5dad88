"""The configuration as frozen models: one class per section, one field per key.

The section of the CPU tier is in ``tiers``, those of slower tiers are in their packages, those of
the engine in ``engine``, and rules for all sections in ``section``. Checks that need the machine
are in ``cli.preflight``.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, field_validator
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
    setting,
)
from kvtier.config.tiers import CpuConfig, SealConfig, TierSection, secret_in
from kvtier.core.eviction import EVICTION_POLICIES, policy_help
from kvtier.core.plan import PlannerSettings
from kvtier.core.tier_registry import SLOW_TIERS, TIERS, TierName
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
    "tier_sections",
    "with_secrets",
]


def default_socket(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the default socket: in the user's runtime directory, or in /tmp."""
    if run_time := environment.get("XDG_RUNTIME_DIR"):
        return Path(run_time) / "kvtier" / "kvtier.sock"
    return Path(f"/tmp/kvtier-{os.getuid()}/kvtier.sock")  # noqa: S108 - short, and mode 0700


class DaemonConfig(Section):
    """The daemon process: one per node."""

    socket: Path = setting(
        None,
        "Unix socket that the daemon listens on; without XDG_RUNTIME_DIR it is "
        "/tmp/kvtier-UID/kvtier.sock. At most 101 bytes: Linux allows 107, and the name of the "
        "arena's socket is longer by .arena.",
        why="Only this user can access it, and it does not survive a reboot.",
        shown="$XDG_RUNTIME_DIR/kvtier/kvtier.sock",
        example="/run/kvtier/kvtier.sock",
        default_factory=default_socket,
    )
    lease_ns: int = setting(
        30 * SECOND,
        "How long a client may keep blocks pinned without renewing its lease. Attached engines "
        "keep the lease time that they were given when they registered.",
        why="Long enough for the slowest load, and short enough that a hung client does not fill "
        "the CPU tier.",
        live=True,
        ge=100 * MS,
        le=HOUR,
    )
    stop_grace_ns: int = setting(
        20 * SECOND,
        "Time from SIGTERM until the process exits, even if something hangs. Running requests get "
        "0.7 of it (0.9 in an engine without a daemon). Keep it below systemd's TimeoutStopSec and "
        "Kubernetes' terminationGracePeriodSeconds.",
        why="Below the defaults of Kubernetes (30 s) and systemd (90 s).",
        live=True,
        ge=SECOND,
        le=10 * 60 * SECOND,
    )
    allowed_uids: tuple[Annotated[int, Field(ge=0, le=2**32 - 2)], ...] = setting(
        (),
        "Users who may attach engines and operate the daemon, besides root and the daemon's own "
        "user. If any are set, all users can connect to the sockets, and the daemon checks the "
        "caller's user ID, which it gets from the kernel.",
        why="A user who can attach an engine can read every prompt on the node.",
        shown="none",
        example="[1000, 65532]",
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info",
        "Lowest level of the log lines that are written to standard error. An engine reads it when "
        "it starts; an engine started by the daemon gets the value that the daemon started with.",
        why="At info, an idle daemon writes a few lines a day.",
        live=True,
    )
    log_format: Literal["text", "json"] = setting(
        "text",
        "Format of log lines: key=value pairs, or one JSON object per line for log collectors. The "
        "daemon and its engines use the same format.",
        why="Text is easier to read without a collector.",
    )
    traces: bool = setting(
        False,
        "Whether to trace requests with OpenTelemetry. The OTEL_* environment variables set the "
        "endpoint and the sampling rate. An engine reads it when it starts.",
        why="Tracing needs kvtier[otel] and a collector.",
    )

    def conflicts(self) -> Iterable[ConfigError]:
        """Check that the socket has a file name; its lock and other sockets are named after it."""
        if not self.socket.name:
            yield ConfigError(
                "daemon.socket",
                f"{self.socket} has no file name",
                "give a path in a directory of its own",
            )


if TYPE_CHECKING:
    EvictionName = str
else:
    EvictionName = Literal[tuple(EVICTION_POLICIES)]


class PolicyConfig(Section):
    """Which blocks are kept, and up to which depth of a prompt."""

    eviction: EvictionName = setting(
        next(iter(EVICTION_POLICIES)),
        "Which blocks are evicted from the CPU tier first, and from the SSD tier unless "
        "ssd.eviction is set. " + policy_help(),
        why="It saved the most time on every trace tested.",
    )
    max_offload_tokens: Literal["auto"] | Annotated[int, Field(ge=0, le=2**31 - 1)] = setting(
        "auto",
        "How many leading tokens of a request are kept, rounded down to blocks; 0 keeps none. "
        "auto: up to the depth at which the request's traffic class has reused tokens so far.",
        why="No fixed number suits two kinds of traffic.",
        live=True,
    )
    answers: bool = setting(
        True,
        "Whether blocks with generated tokens are kept. false: only prompts are kept, for example "
        "because the next turn omits the reasoning; an answer is then kept once it appears in a "
        "later prompt.",
        why="The next prompt of a conversation contains the last answer.",
        live=True,
    )
    pin_share: float = setting(
        0.25,
        "Share of the CPU tier that pins, priorities, TTLs and waiting requests together may "
        "protect from eviction. Lowering it revokes no protection that was already granted.",
        why="Protected blocks leave less room for all others.",
        live=True,
        ge=0.0,
        le=0.5,
    )


_PLANNER = PlannerSettings()


class CostConfig(Section):
    """When blocks are restored instead of recomputed."""

    restore: Literal["auto", "always", "never"] = setting(
        _PLANNER.mode,
        "auto: restore as many blocks as is faster than computing them, according to measurements; "
        "always: restore every cached block; never: restore nothing, but still store blocks.",
        why="Measurements on this node are better than any fixed rule.",
        live=True,
    )
    split: bool = setting(
        _PLANNER.is_split_allowed,
        "Whether the integrated engine may compute the start of a prompt while the rest is being "
        "loaded.",
        why="It is used only if it is predicted to finish sooner.",
        live=True,
    )
    guard: bool = setting(
        _PLANNER.is_guarded,
        "Whether a tier is skipped for a while after restores from it took longer than computing "
        "would have.",
        why="Without it, a tier that becomes slow keeps delaying requests.",
        live=True,
    )
    wait_max_ns: int = setting(
        _PLANNER.wait_max_ns,
        "Maximum time that a request waits for its blocks, regardless of the prediction.",
        why="Longer than any restore that pays off on the machines measured.",
        live=True,
        ge=10 * MS,
        le=10 * 60 * SECOND,
    )
    probe: Literal["start", "off"] = setting(
        "start",
        "Whether each tier is benchmarked when the daemon starts: a few MiB are written and read. "
        "Earlier measurements are stored with the SSD tier.",
        why="Without it, the first decisions are guesses.",
        live=True,
    )


class RpcConfig(Section):
    """Operator calls over TCP: off by default, and always with TLS and a token."""

    listen: ListenAddress | None = setting(
        None,
        "Host and port for kvtier stat, drop and fsck from other machines; empty: only the Unix "
        "socket.",
        why="Remote access must be enabled explicitly.",
        shown="off",
        example="0.0.0.0:9465",
    )
    tls_cert: Path | None = setting(
        None,
        "Certificate chain of the daemon, in PEM. A changed file is used without a restart.",
        why="Only the operator can provide one.",
        shown="none",
        example="/etc/kvtier/tls.crt",
    )
    tls_key: Path | None = setting(
        None,
        "Private key of the certificate, in PEM: RSA, P-256 or P-384.",
        why="Only the operator can provide one.",
        shown="none",
        example="/etc/kvtier/tls.key",
    )
    token_file: Path | None = setting(
        None,
        "File with the token that every call must carry, or with several, one per line; at least "
        "16 characters each.",
        why="A generated token would have to be copied to the clients anyway.",
        shown="none",
        example="/etc/kvtier/token",
    )

    def conflicts(self) -> Iterable[ConfigError]:
        """Check that certificate, key and token are set if the server listens."""
        for key in ("tls_cert", "tls_key", "token_file"):
            if self.listen is not None and getattr(self, key) is None:
                yield ConfigError(
                    f"rpc.{key}", "is required if rpc.listen is set", "set it or unset rpc.listen"
                )


class HttpConfig(Section):
    """The daemon's HTTP server: health, metrics and the status page only."""

    listen: ListenAddress | None = setting(
        ListenAddress("127.0.0.1", 9464),
        "Host and port for /healthz, /readyz, /metrics and the status page; empty: no HTTP server.",
        why="Loopback, because this port has no authentication.",
    )
    status_page: bool = setting(
        True,
        "Whether / serves a status page with the contents of kvtier stat.",
        why="The page is read-only and shows little more than /metrics.",
    )
    allowed_hosts: HostNames = ()


class Config(Section):
    """The whole configuration of a node, and the source of each value."""

    daemon: DaemonConfig = Field(default_factory=DaemonConfig)
    cpu: CpuConfig = Field(default_factory=CpuConfig)
    tiers: Mapping[TierName, TierSection] = Field(default_factory=dict, validate_default=True)
    """The section of each slow tier; a file has them at the top level."""
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    cost: CostConfig = Field(default_factory=CostConfig)
    seal: SealConfig = Field(default_factory=SealConfig)
    rpc: RpcConfig = Field(default_factory=RpcConfig)
    http: HttpConfig = Field(default_factory=HttpConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    client: ClientConfig = Field(default_factory=ClientConfig)

    _sources: Mapping[str, str] = PrivateAttr(default_factory=dict)

    def conflicts(self) -> Iterable[ConfigError]:
        """Check that a key file is set if blocks are sealed."""
        for tier, section in self.tiers.items():
            mode = section.seal_mode
            if mode != "off" and self.seal.key_file is None:
                yield ConfigError(
                    "seal.key_file",
                    f'is required if {tier}.seal is "{mode}"',
                    "set it to a file of keys",
                )

    @field_validator("tiers")
    @classmethod
    def _complete(cls, given: Mapping[TierName, TierSection]) -> Mapping[TierName, TierSection]:
        """Add the defaults of the sections that are not given."""
        return {name: given.get(name) or tier_sections()[name]() for name in SLOW_TIERS}

    @classmethod
    def from_sections(cls, sections: Mapping[str, Section], sources: Mapping[str, str]) -> Self:
        """Combine checked sections; ``sources`` maps ``section.key`` to where it was set."""
        config = cls.model_validate(cls.fields_of(sections))
        config._sources = dict(sources)
        return config

    @classmethod
    def fields_of(cls, sections: Mapping[str, Section]) -> dict[str, Any]:
        """Return sections as the fields of this class."""
        fields: dict[str, Any] = {
            name: each for name, each in sections.items() if name in cls.model_fields
        }
        fields["tiers"] = {name: sections[name] for name in SLOW_TIERS if name in sections}
        return fields

    def section(self, name: str) -> Section:
        """Return a section by its name in the file."""
        section: Section = self.tiers[TierName(name)] if name in SLOW_TIERS else getattr(self, name)
        return section

    def with_tier(self, name: TierName, section: TierSection, sources: Mapping[str, str]) -> Self:
        """Return a copy with a new section of a tier; ``sources`` has the changed keys."""
        config = self.model_copy(update={"tiers": {**self.tiers, name: section}})
        config._sources = {**self._sources, **sources}
        return config

    def source_of(self, key: str) -> str:
        """Return where ``section.key`` was set: a file, a variable, an option, or ``default``."""
        return self._sources.get(key, "default")


@cache
def tier_sections() -> Mapping[TierName, type[TierSection]]:
    """Return the class of each slow tier's section, which its package defines."""
    return {name: import_module(f"{TIERS[name].package}.settings").SETTINGS for name in SLOW_TIERS}


@cache
def section_models() -> Mapping[str, type[Section]]:
    """Return the class of each section by name, in the order of the documentation."""
    models: dict[str, type[Section]] = {}
    for name, field in Config.model_fields.items():
        if name == "tiers":
            models |= {tier.value: section for tier, section in tier_sections().items()}
            continue
        model = field.annotation
        assert isinstance(model, type), f"section {name} has no class"
        assert issubclass(model, Section), f"section {name} is not a Section"
        models[name] = model
    return models


def all_settings() -> Iterator[tuple[str, str, str, FieldInfo]]:
    """Yield each ``section.key`` with its section's name, its field's name and the field."""
    for section, model in section_models().items():
        for name, field in model.model_fields.items():
            yield f"{section}.{key_of(name)}", section, name, field


SYSTEM_SOCKET = Path("/run/kvtier/kvtier.sock")
"""Socket of a daemon that runs as a system service, as set up by ``deploy/``."""

SYSTEM_CONFIG = Path("/etc/kvtier/kvtier.toml")
"""Configuration of a daemon that runs as a system service."""


def find_socket(socket: Path, system: Path = SYSTEM_SOCKET) -> Path:
    """Return ``system`` if ``socket`` is the default and only the system's socket exists."""
    is_default = socket == default_socket()
    if is_default and not os.access(socket, os.F_OK) and os.access(system, os.F_OK):
        return system
    return socket


def with_secrets(config: Config) -> Config:
    """Return ``config`` with the settings of tiers that are in files of their own.

    Reads the files each time. Raises ConfigError, which never contains their content.
    """
    for name, section in config.tiers.items():
        if (path := section.secret_file) is not None:
            value = secret_in(name, section, path)
            sources = {f"{name}.{section.file_backed_key}": str(path)}
            config = config.with_tier(name, section.with_secret(value), sources)
    return config
