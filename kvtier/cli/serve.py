"""``kvtier serve``: runs the daemon, and with a model also an engine as its child."""

import argparse
import asyncio
import ctypes
import os
import signal
from collections.abc import Sequence
from functools import partial

from kvtier.cli.options import add_config_options, config_from, reread_config
from kvtier.cli.preflight import check_limits, check_start
from kvtier.cli.signals import hangup_stops
from kvtier.config import Config
from kvtier.config.model import with_secrets
from kvtier.config.toml_text import document
from kvtier.daemon.daemon import Daemon
from kvtier.daemon.reload import Reload
from kvtier.daemon.serving.systemd import Systemd
from kvtier.daemon.stop import Reaction, Stop, handle_signals
from kvtier.daemon.supervisor import Supervisor
from kvtier.daemon.tiers.opening import load_keys
from kvtier.errors import ConfigError
from kvtier.observe.log import log_unhandled_exceptions, start_log
from kvtier.observe.trace import start_traces

__all__ = ["add_options", "run", "stop_with_parent"]

_ENGINE_SECTIONS = frozenset({"daemon", "engine", "client"})
"""Sections that an engine reads. They hold no secrets: command lines are public."""

_PR_SET_PDEATHSIG = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_config_options(
        parser,
        ("--model", "engine.model", "model folder or GGUF file to serve"),
        ("--listen", "engine.listen", "host:port of the OpenAI-compatible server"),
        ("--socket", "daemon.socket", "Unix socket for engines and commands"),
    )
    parser.add_argument("--ends-with", type=int, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM, SIGINT, or the terminal closes; any other SIGHUP reloads."""
    if options.ends_with is not None:
        stop_with_parent(options.ends_with)
    config = with_secrets(config_from(options))
    check_limits()  # before logging starts a thread
    log_unhandled_exceptions()
    start_log(config.daemon.log_level, config.daemon.log_format)
    if config.daemon.traces:
        start_traces("kvtier")
    check_start(config)
    ring = load_keys(config)
    stop = Stop(config.daemon.stop_grace_ns / 1e9)
    systemd = Systemd.from_environment()
    reload = Reload(
        config,
        partial(_read_again, options),
        path=options.config,
        around=systemd.reloading,
    )
    reactions: dict[signal.Signals, Reaction] = {
        signal.SIGTERM: stop.request,
        signal.SIGINT: stop.request,
        signal.SIGQUIT: stop.cut,
        signal.SIGHUP: stop.request_once if hangup_stops() else lambda _number: reload.request(),
    }
    daemon = Daemon(config, ring=ring, stop=stop, systemd=systemd, reload=reload)
    with handle_signals(reactions):
        return asyncio.run(_serve(daemon, stop))


def _read_again(options: argparse.Namespace) -> Config | Sequence[ConfigError]:
    """Return the current configuration with the URL of the remote tier, or all errors in it."""
    read = reread_config(options)
    try:
        return with_secrets(read) if isinstance(read, Config) else read
    except ConfigError as error:
        return (error,)


async def _serve(daemon: Daemon, stop: Stop) -> int:
    config, stopping = daemon.config, stop.attach()
    async with daemon.serving():
        if config.engine.model is None:
            await stopping.wait()
            return 0
        supervisor = Supervisor(config.daemon.socket, _engine_arguments(config), stop)
        stop.abandon = supervisor.kill
        return await supervisor.run(stopping)


def _engine_arguments(config: Config) -> list[str]:
    """Return options that give the engine the daemon's configuration.

    The file may have changed by the time that an engine is restarted.
    """
    return [
        word
        for key, each in document(config).items()
        if key.partition(".")[0] in _ENGINE_SECTIONS and each["source"] != "default"
        for word in ("--set", f"{key}={each['value']}")
    ]


def stop_with_parent(parent: int) -> None:
    """Let the kernel send SIGTERM when the parent exits, or at once if it already has."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
