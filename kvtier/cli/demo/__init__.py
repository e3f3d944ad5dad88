"""``kvtier demo``: asks a real model about a document, once per tier, and compares the times."""

import argparse
import importlib.util
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import kvtier
from kvtier.cli.files import read_text
from kvtier.errors import StartError

__all__ = ["add_options", "run"]

_MODEL = Path(".model") / "smollm2-135m-instruct.gguf"
_MODEL_VARIABLE = "KVTIER_DEMO_MODEL"
_PACKAGES = ("openai", "torch", "transformers", "gguf")

_DOCUMENT_BYTES_MAX = 4 << 20
"""More than any model's context; a larger file is a mistake."""

_REDIS_TIMEOUT_S = 2.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help=f"model folder or GGUF file (default: ${_MODEL_VARIABLE}, or that of `make setup`)",
    )
    parser.add_argument(
        "--document",
        type=Path,
        metavar="FILE",
        help="text to ask about (default: kvtier's documentation)",
    )
    parser.add_argument(
        "--redis", default="", metavar="URL", help="also use this Redis or Valkey server"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Show a hit in every tier; exit code 1 if a tier did not serve or an answer differs."""
    for name in (*_PACKAGES, "redis") if options.redis else _PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise StartError(
                "demo", f"package {name} is not installed", "pip install 'kvtier[demo]'"
            )
    model = _model(options.model)
    document = _document(options.document)
    if options.redis:
        _check_redis(options.redis)
    # Slow imports, after the checks.
    from kvtier.cli.demo.deployment import DemoDeployment
    from kvtier.cli.demo.passes import DemoProgress, DemoRun, as_json, print_table

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _interrupt)
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-demo-", dir=_parent()) as directory,
        DemoProgress() as progress,
        DemoDeployment(Path(directory), model, options.redis) as product,
    ):
        passes = DemoRun(product, document, progress).passes()
    if options.json:
        print(as_json(passes))
    else:
        print_table(passes)
    problems = [problem for done in passes for problem in done.problems]
    for problem in problems:
        print(f"kvtier: {problem}", file=sys.stderr)
    return int(bool(problems))


def _interrupt(_number: int, _frame: object) -> NoReturn:
    """Exit like Ctrl-C: stop the processes and remove the directory."""
    raise KeyboardInterrupt


def _parent() -> Path | None:
    """Return the parent of the demo's directory: on a disk, since /tmp is often in memory."""
    on_disk = Path("/var/tmp")  # noqa: S108 - only the parent of a private directory
    is_chosen = "TMPDIR" in os.environ or not os.access(on_disk, os.W_OK)
    return None if is_chosen else on_disk


def _model(given: Path | None) -> Path:
    """Return the model to use. Raises StartError if there is none."""
    beside = Path(kvtier.__file__).parents[1] / _MODEL
    named = os.environ.get(_MODEL_VARIABLE)
    path = given or (Path(named) if named else beside)
    if not path.exists():
        raise StartError("--model", f"no model at {path}", "run `make setup`, or pass --model PATH")
    return path.absolute()


def _document(given: Path | None) -> str:
    """Return the text to ask about. Raises StartError."""
    package = Path(__file__).parents[1]
    checkout = Path(kvtier.__file__).parents[1] / "docs" / "architecture.md"
    path = given or (checkout if checkout.exists() else package / "document.md")
    return read_text("--document", path, _DOCUMENT_BYTES_MAX)


def _check_redis(url: str) -> None:
    """Check that the server answers. Errors omit the URL, which may contain a password."""
    import redis

    try:
        with redis.Redis.from_url(
            url, socket_timeout=_REDIS_TIMEOUT_S, socket_connect_timeout=_REDIS_TIMEOUT_S
        ) as server:
            server.ping()
    except ValueError as error:
        raise StartError(
            "--redis", "not a valid URL", "give one such as redis://127.0.0.1:6379/0"
        ) from error
    except redis.RedisError as error:
        raise StartError(
            "--redis",
            f"the server does not answer ({type(error).__name__})",
            "start it, or fix the URL",
        ) from error
