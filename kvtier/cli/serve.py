"""``kvtier serve``: the daemon, and with a model its engine as a supervised child."""

import argparse
import asyncio
import signal
from typing import Any

from kvtier.cli.options import add_config_options, config_of
from kvtier.cli.preflight import check_start
from kvtier.config import Config
from kvtier.daemon.daemon import Daemon
from kvtier.daemon.supervisor import Supervisor
from kvtier.observe.log import Log, start_log

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
    return asyncio.run(_serve(config, options))


async def _serve(config: Config, options: argparse.Namespace) -> int:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop, number, stopping, loop)
    async with Daemon(config).serving():
        if config.engine.model is None:
            await stopping.wait()
            return 0
        supervisor = Supervisor(config.daemon.socket, _engine_arguments(options))
        return await supervisor.run(stopping)


def _stop(number: signal.Signals, stopping: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
    """Stop in order; a second signal has its usual, sudden effect."""
    _log.info("stopping", signal=number.name)
    loop.remove_signal_handler(number)
    stopping.set()


def _engine_arguments(options: argparse.Namespace) -> list[str]:
    """Return the command line that gives the engine the very configuration of the daemon."""
    arguments = ["--config", str(options.config)] if options.config else []
    for item in options.set:
        arguments += ["--set", item]
    for name, value in vars(options).items():
        if name.startswith("key:") and value is not None:
            arguments += ["--set", f"{name.removeprefix('key:')}={value}"]
    return arguments
