"""``kvtier serve``: the daemon, and with a model its engine as a supervised child."""

import argparse
import asyncio
import signal
from typing import Any

from kvtier.cli.options import add_config_options, config_of
from kvtier.cli.preflight import check_start
from kvtier.config import Config
from kvtier.daemon.daemon import Daemon
from kvtier.daemon.stop import Reaction, Stop, signals_heard
from kvtier.daemon.supervisor import Supervisor
from kvtier.daemon.tiers import load_keys
from kvtier.errors import StartError
from kvtier.observe.log import Log, start_log
from kvtier.tiers.seal import KeyRing

__all__ = ["add_parser", "run"]

_log = Log("kvtier.daemon")


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser("serve", help="run the daemon, and with --model an engine")
    add_config_options(
        parser,
        ("--model", "engine.model", "model folder or GGUF file to serve"),
        ("--listen", "engine.listen", "host:port of the OpenAI-compatible server"),
        ("--socket", "daemon.socket", "Unix socket for engines and tools"),
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT."""
    config = config_of(options)
    start_log(config.daemon.log_level)
    check_start(config)
    ring = load_keys(config)
    stop = Stop(config.daemon.stop_grace_ns / 1e9)
    reactions: dict[signal.Signals, Reaction] = {
        signal.SIGTERM: stop.told,
        signal.SIGINT: stop.told,
        signal.SIGHUP: lambda _number: _reload(ring),
    }
    with signals_heard(reactions):
        return asyncio.run(_serve(config, options, ring, stop))


async def _serve(
    config: Config, options: argparse.Namespace, ring: KeyRing | None, stop: Stop
) -> int:
    stopping = stop.attach()
    async with Daemon(config, ring=ring, stop=stop).serving():
        if config.engine.model is None:
            await stopping.wait()
            return 0
        supervisor = Supervisor(config.daemon.socket, _engine_arguments(options), stop)
        stop.abandon = supervisor.kill
        return await supervisor.run(stopping)


def _reload(ring: KeyRing | None) -> None:
    """Read the keys again; those of before stay where the file is no good."""
    if ring is None:
        return
    try:
        ring.reload()
    except StartError as error:
        _log.error("the keys stay as they were", error=error)
    else:
        _log.info("keys read again")


def _engine_arguments(options: argparse.Namespace) -> list[str]:
    """Return the command line that gives the engine the very configuration of the daemon."""
    arguments = ["--config", str(options.config)] if options.config else []
    for item in options.set:
        arguments += ["--set", item]
    for name, value in vars(options).items():
        if name.startswith("key:") and value is not None:
            arguments += ["--set", f"{name.removeprefix('key:')}={value}"]
    return arguments
