"""``kvtier engine``: runs an engine with its OpenAI-compatible server, attached to a daemon."""

import argparse
import gc
import os
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.cli.options import add_config_options, config_from
from kvtier.cli.preflight import check_free, check_limits, check_packages, check_pool
from kvtier.cli.signals import hangup_stops
from kvtier.config import Config, EngineConfig
from kvtier.daemon.stop import Reaction, Stop, handle_signals
from kvtier.engine.support import check_model
from kvtier.errors import StartError
from kvtier.lock import PathLock
from kvtier.observe.daemon_metrics import SECRET_REFUSED
from kvtier.observe.log import Log, log_unhandled_exceptions, start_log
from kvtier.observe.log_output import write_to_stderr
from kvtier.observe.secret_rotation import LOOK_EVERY_S, SecretRotation
from kvtier.observe.trace import start_traces
from kvtier.secret import Secret

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.applications import Starlette

    from kvtier.api.http.chain import ChainIdentity
    from kvtier.api.http.server import HttpServer
    from kvtier.api.http.tenant import TenantRules
    from kvtier.engine.engine import Engine
    from kvtier.engine.model import LoadedModel
    from kvtier.engine.pool import BlockPool
    from kvtier.engine.runner import EngineRunner
    from kvtier.engine.settings import EngineSettings
    from kvtier.observe.daemon_metrics import TransferRoute

__all__ = ["add_options", "run"]

_log = Log("kvtier.engine")

_METER_PERIOD_S = 1.0
_CUT_SHARE = 0.1
"""Share of the grace period for aborting the requests that are still running."""

_CUT_S = 1.0
"""Time for a step to finish, and again for clients to receive their last event."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_config_options(
        parser,
        ("--model", "engine.model", "model folder or GGUF file to serve"),
        ("--listen", "engine.listen", "host:port of the OpenAI-compatible server"),
        ("--connect", "daemon.socket", "Unix socket of the daemon"),
    )
    # The option has this name in `kvtier serve`.
    parser.add_argument("--socket", dest="key:daemon.socket", help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help="run without a daemon")
    parser.add_argument("--supervised", metavar="NOTE", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM, SIGINT, or the terminal closes."""
    config = config_from(options)
    check_limits()
    log_unhandled_exceptions()
    start_log(config.daemon.log_level, config.daemon.log_format)
    if config.daemon.traces:
        start_traces("kvtier-engine")
    # Read when transformers and tqdm are imported: no downloads, no progress bars in the log.
    os.environ["HF_HUB_OFFLINE"] = os.environ["TQDM_DISABLE"] = "1"
    if config.engine.model is None:
        raise StartError("engine.model", "not set", "pass --model FOLDER or FILE.gguf")
    check_packages()
    lock = None
    if options.supervised:
        from kvtier.daemon.supervisor import engine_lock

        lock = PathLock(
            engine_lock(config.daemon.socket),
            "daemon.socket",
            "the daemon's engine",
            options.supervised,
        )
    check_pool(config)
    check_model(config.engine.model, config.engine.context_limit)  # before torch, which is slow
    check_free("engine.listen", config.engine.listen)
    stop = Stop(config.daemon.stop_grace_ns / 1e9, log=_log)
    reactions = _reactions(stop, is_supervised=bool(options.supervised))
    _serve(config, config.engine.model, stop, reactions, lock, is_alone=options.alone)
    return 0


def _reactions(stop: Stop, *, is_supervised: bool) -> dict[signal.Signals, Reaction]:
    """Return the signal handlers: the first signal stops, a second one or SIGQUIT aborts.

    A supervised engine may get the first signal twice: from its daemon and its process group.
    """
    stop_engine = stop.request_once if is_supervised else stop.request
    reactions: dict[signal.Signals, Reaction] = {
        signal.SIGTERM: stop_engine,
        signal.SIGINT: stop_engine,
        signal.SIGQUIT: stop.cut,
    }
    if not is_supervised and hangup_stops():  # otherwise SIGHUP stays blocked
        reactions[signal.SIGHUP] = stop.request_once
    return reactions


def _serve(
    config: Config,
    path: Path,
    stop: Stop,
    reactions: Mapping[signal.Signals, Reaction],
    lock: PathLock | None,
    *,
    is_alone: bool,
) -> None:
    """Load the model, then serve until stopped."""
    tenants = _tenants(config)
    loaded = _load(config.engine, path)
    from prometheus_client import CollectorRegistry, ProcessCollector

    from kvtier.api.http.app import create_app
    from kvtier.engine.engine import Engine, create_pool
    from kvtier.engine.metrics import EngineMetrics
    from kvtier.engine.runner import EngineRunner

    settings = _settings(config)
    pool = create_pool(loaded, settings)
    metrics = EngineMetrics(CollectorRegistry())
    ProcessCollector(registry=metrics.metrics.registry)
    attached = None if is_alone else _Attached(config, loaded, settings, pool, metrics.copied)
    engine = Engine(loaded, settings, attached.port if attached else _no_port(settings), pool=pool)
    runner = EngineRunner(engine)
    runner.start()
    if attached:
        attached.start(runner)
    served = replace(
        loaded,
        model_id=config.engine.served_model_name or loaded.model_id,
        context_limit=min(loaded.context_limit, pool.num_blocks * settings.engine_block_tokens),
        parse_special_in_messages=config.engine.parse_special_in_messages,
    )
    _warn_of_template(served)
    app = create_app(
        runner,
        served,
        registry=metrics.metrics.registry,
        observer=metrics,
        tenants=tenants,
        identity=_identity(loaded, settings),
    )
    if tenants.keys:
        threading.Thread(
            target=_rotate, args=(tenants.keys, stop.begun), name="kvtier-secrets", daemon=True
        ).start()

    def update() -> None:
        metrics.update(
            engine.snapshot(),
            engine.take_reports(),
            is_ready=runner.is_ready,
            is_attached=attached is not None and attached.client.is_attached,
        )
        if keys := tenants.keys:
            metrics.metrics.set(SECRET_REFUSED, bool(keys.fault), secret=keys.name)

    server = _listen(config, app, is_alone=is_alone)
    # Signals are handled from here on: nothing needs a shutdown while the model loads.
    with handle_signals(reactions), server:
        stop.abandon = partial(_end_requests, runner, server)
        stop.stage = "serving"
        _announce(config, served.model_id, server.url)
        while not stop.begun.wait(_METER_PERIOD_S):
            update()
            _keep(lock)
        _drain(runner, stop, update)
        _end_requests(runner, server)


def _keep(lock: PathLock | None) -> None:
    """Recreate the lock file if it was removed: a later daemon finds this engine by it."""
    if lock is None or lock.is_in_place():
        return
    with suppress(StartError):  # the directory is gone, or another engine has the lock
        lock.renew()
        _log.warning("lock file was removed; created it again", path=lock.path)


def _listen(config: Config, app: "Starlette", *, is_alone: bool) -> "HttpServer":
    """Serve the application on the engine's TCP port, and on a Unix socket beside the daemon's."""
    from kvtier.api.http.cross_origin import CrossOriginRules
    from kvtier.api.http.operator_socket import Operators
    from kvtier.api.http.server import serve

    daemon = config.daemon
    return serve(
        app,
        config.engine.listen.host,
        config.engine.listen.port,
        field="engine.listen",
        grace_seconds=_CUT_S,
        allowed=CrossOriginRules(config.engine.allowed_hosts, config.engine.cors_origins),
        operators=None if is_alone else Operators(daemon.socket, daemon.allowed_uids),
    )


def _drain(runner: "EngineRunner", stop: Stop, update: "Callable[[], None]") -> None:
    """Reject new requests, and let running ones finish within the grace period."""
    stop.stage = "waiting for running requests"
    runner.drain()
    cut_s = _CUT_SHARE * stop.left_s
    while (rest_s := stop.left_s - cut_s) > 0:
        if runner.await_idle(min(_METER_PERIOD_S, rest_s)):
            return
        update()


def _end_requests(runner: "EngineRunner", server: "HttpServer") -> None:
    """Abort the requests that are still running, and notify their clients. Idempotent."""
    if not runner.stop(_CUT_S):
        _log.error("engine did not stop in time")
    server.stop()


def _load(config: EngineConfig, path: Path) -> "LoadedModel":
    """Load the model, and exclude its objects from garbage collection.

    Importing torch creates 400,000 objects. Traversing them takes a sixth of the startup time, and
    would later delay responses.
    """
    gc.disable()
    from kvtier.engine.model import load_model

    loaded = load_model(
        path, device=config.device, dtype=config.dtype, context_limit=config.context_limit
    )
    gc.collect()
    gc.freeze()
    gc.enable()
    return loaded


def _warn_of_template(served: "LoadedModel") -> None:
    """Warn if a message can imitate the turns of the chat template without special tokens."""
    with suppress(ValueError):  # the model has no chat template
        if not served.chat_template.marks_turns:
            _log.warning(
                "the chat template separates messages by plain text, which a message can imitate; "
                "see docs/operations/security.md",
                model=served.model_id,
            )


def _announce(config: Config, model_id: str, url: str) -> None:
    """Log that the model is served."""
    # Shorter shared prefixes are always recomputed.
    least = config.engine.block_tokens
    _log.info("serving", url=url, model=model_id, pid=os.getpid(), smallest_prefix_tokens=least)
    if config.daemon.log_format == "text":  # JSON is not for people
        _say(f"kvtier: {model_id} at {url}/v1")


def _say(words: str) -> None:
    """Print a line, without blocking if nobody reads the terminal or pipe."""
    threading.Thread(target=write_to_stderr, args=(f"{words}\n",), daemon=True).start()


def _settings(config: Config) -> "EngineSettings":
    from kvtier.engine.settings import EngineSettings

    return EngineSettings(
        pool_bytes=config.engine.pool_bytes,
        engine_block_tokens=config.engine.engine_block_tokens,
        block_tokens=config.engine.block_tokens,
        max_batch_tokens=config.engine.max_batch_tokens,
        max_num_sequences=config.engine.max_sequences,
    )


def _tenants(config: Config) -> "TenantRules":
    from kvtier.api.http.tenant import TenantRules, api_keys

    keys_file = config.engine.api_keys_file
    is_from_key = config.engine.tenant_from == "api_key"
    return TenantRules(is_from_key, api_keys(keys_file) if keys_file else None)


def _rotate(keys: Secret[Any], stopping: threading.Event) -> None:
    """Reload changed API keys, on a separate thread since a mount may hang."""
    rotation = SecretRotation()
    while not stopping.wait(LOOK_EVERY_S):
        rotation.look([keys])


def _identity(loaded: "LoadedModel", settings: "EngineSettings") -> "ChainIdentity":
    from kvtier.api.http.chain import ChainIdentity
    from kvtier.engine.engine import block_layout
    from kvtier.engine.model import key_space

    space = key_space(loaded, block_layout(loaded, settings))
    return ChainIdentity(space.digest, settings.block_tokens)


def _no_port(settings: "EngineSettings") -> Any:
    from kvtier.engine.port import NoPort

    return NoPort(settings.block_tokens)


class _Attached:
    """The engine's connection to a daemon, which also reports the GPU tier."""

    def __init__(
        self,
        config: Config,
        loaded: "LoadedModel",
        settings: "EngineSettings",
        pool: "BlockPool",
        on_copied: "Callable[[TransferRoute, float], object]",
    ) -> None:
        from kvtier.client import Client, ClientDeadlines
        from kvtier.connectors.integrated import DaemonPort
        from kvtier.engine.engine import block_layout
        from kvtier.engine.model import key_space, model_flops

        self._block_tokens = settings.engine_block_tokens
        self._runner: EngineRunner | None = None
        timeouts = config.client
        self.client: Client = Client(
            config.daemon.socket,
            key_space(loaded, block_layout(loaded, settings)),
            f"kvtier {config.engine.served_model_name or loaded.model_id}",
            deadlines=ClientDeadlines(
                lookup_s=timeouts.lookup_deadline_ns / 1e9,
                load_s=timeouts.load_deadline_ns / 1e9,
                store_s=timeouts.store_deadline_ns / 1e9,
                reconnect_s=timeouts.reconnect_ns / 1e9,
            ),
            drop=self._drop,
            own_tier=self._own_tier,
            flops=model_flops(loaded),
            can_split=True,
        )
        self.port = DaemonPort(
            self.client,
            pool,
            block_tokens=settings.block_tokens,
            engine_block_bytes=pool.shape.block_bytes,
            on_copied=on_copied,
        )

    def start(self, runner: "EngineRunner") -> None:
        """Connect to the daemon; the engine already serves meanwhile."""
        self._runner = runner
        self.client.start()

    def _drop(self) -> Any:
        from kvtier.tiers.base import Removed

        assert self._runner is not None
        dropped = self._runner.call(lambda engine: engine.drop_cache())
        num_tokens = dropped.num_blocks * self._block_tokens
        return Removed(num_tokens // self.port.block_tokens, dropped.num_bytes)

    def _own_tier(self) -> Any:
        from kvtier.client import OwnTier
        from kvtier.core.residency import TierName

        assert self._runner is not None
        engine: Engine = self._runner.engine
        snapshot = engine.snapshot()
        counts = snapshot.pool_blocks
        num_held = counts.used + counts.cached
        return OwnTier(
            capacity_bytes=(num_held + counts.free) * snapshot.block_bytes,
            used_bytes=num_held * snapshot.block_bytes,
            used_tokens=num_held * self._block_tokens,
            hit_tokens=snapshot.prompt_tokens_by_tier.get(TierName.GPU, 0),
        )
