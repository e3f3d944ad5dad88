"""The prompt that a command refers to: given as text, messages or token ids, hashed by an engine.

Only an engine can turn text into tokens, and tokens into block hashes; see ``api.http.chain``.
"""

import argparse
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvtier.api.http.operator_socket import engine_socket
from kvtier.cli.files import read_text
from kvtier.cli.options import config_from
from kvtier.core.identity import HASH_BYTES
from kvtier.errors import StartError
from kvtier.v1 import engine_pb2 as pb

__all__ = [
    "NO_FULL_BLOCK",
    "HashedPrompt",
    "add_prompt_options",
    "has_prompt",
    "prompt_from",
    "require_utf8",
]

NO_FULL_BLOCK = "the prompt is shorter than one block, and only full blocks are cached"

_TIMEOUT_S = 60.0
"""Tokenizing a prompt of a million tokens takes half a minute."""

_PROMPT_BYTES_MAX = 16 << 20
"""The engine's limit for a request body."""

_REPLY_BYTES_MAX = 64 << 20
_PATH = "/v1/kvtier/chain"


@dataclass(frozen=True, slots=True)
class HashedPrompt:
    """The block hashes of a prompt, and the engine's answer about it."""

    key_space: bytes
    tenant: bytes
    hashes: bytes
    unsalted: bytes
    """Hashes of the same blocks without the tenant."""

    num_tokens: int
    answer: Mapping[str, Any]
    """The engine's answer without the hashes."""

    @property
    def num_blocks(self) -> int:
        """Return the number of full blocks."""
        return len(self.hashes) // HASH_BYTES

    @property
    def chain(self) -> pb.Chain:
        """Return the hashes as a message."""
        return pb.Chain(tenant=self.tenant, hashes=self.hashes)


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for a prompt and the engine that tokenizes it."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--prompt", metavar="TEXT|@FILE", help="prompt text, or @FILE to read it from (@-: stdin)"
    )
    what.add_argument(
        "--messages", metavar="FILE", help="JSON list of chat messages (-: standard input)"
    )
    what.add_argument(
        "--tokens", metavar="FILE", help="token ids, a JSON list or one per line (-: stdin)"
    )
    parser.add_argument("--salt", metavar="SALT", help="cache_salt of the request")
    parser.add_argument(
        "--engine", metavar="URL", help="engine with that model (default: http:// engine.listen)"
    )
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="file with an API key of the engine"
    )


def has_prompt(options: argparse.Namespace) -> bool:
    """Return whether the command line has a prompt."""
    return any(each is not None for each in (options.prompt, options.messages, options.tokens))


def prompt_from(
    options: argparse.Namespace, *, with_text: bool = False, daemon: Path | None = None
) -> HashedPrompt:
    """Return the block hashes of the prompt on the command line. Raises StartError.

    ``daemon`` is the path of the daemon's socket. If it is given, the engine is queried over its
    own Unix socket beside it, where it also returns what only operators may see.
    """
    if not has_prompt(options):
        raise StartError("--prompt", "no prompt", "pass one of --prompt, --messages or --tokens")
    body = _body(options) | ({"with_text": True} if with_text else {})
    if options.salt is not None:
        if not options.salt:  # mostly an unset shell variable
            raise StartError("--salt", "is empty", "give a salt, or omit the option")
        body["cache_salt"] = require_utf8("--salt", options.salt)
    url = _engine_url(options)
    path = None
    if daemon is not None and (options.engine is None or _is_on_loopback(url)):
        path = engine_socket(daemon, urlsplit(url).port or 80)
    return _parse_answer(url, _post(url, body, _api_key(options), path))


def _body(options: argparse.Namespace) -> dict[str, Any]:
    if options.prompt is not None:
        given: str = options.prompt
        text = _read("--prompt", given[1:]) if given.startswith("@") else given
        if not text:
            raise StartError("--prompt", "is empty", "give a text or @FILE")
        return {"prompt": require_utf8("--prompt", text)}
    if options.messages is not None:
        messages = _parse_json("--messages", _read("--messages", options.messages))
        if isinstance(messages, dict):  # a whole request, as clients log it
            messages = messages.get("messages")
        if not isinstance(messages, list):
            raise StartError("--messages", "not a list", 'give [{"role": …, "content": …}, …]')
        return {"messages": messages}
    text = _read("--tokens", options.tokens)
    if text.lstrip().startswith("["):
        return {"token_ids": _parse_json("--tokens", text)}
    try:
        return {"token_ids": [int(word) for word in text.replace(",", " ").split()]}
    except ValueError:
        problem, remedy = "not a list of token ids", "give a JSON list, or one id per line"
        raise StartError("--tokens", problem, remedy) from None


def require_utf8(option: str, text: str) -> str:
    """Return the text of an option. Raises StartError if it is not valid UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise StartError(option, "not valid UTF-8", "give UTF-8 text") from None
    return text


def _read(option: str, path: str) -> str:
    return read_text(option, path, _PROMPT_BYTES_MAX)


def _parse_json(option: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StartError(option, f"invalid JSON: {error}", "give a JSON list") from None


def _engine_url(options: argparse.Namespace) -> str:
    """Return the URL of the engine, without the path of its API."""
    given: str | None = options.engine
    if given is None:
        return f"http://{config_from(options).engine.listen}"
    invalid = StartError("--engine", f"{given!r} is not a valid URL", "give http://HOST:PORT")
    try:
        url = urlsplit(given)
        has_host = bool(url.hostname) and url.port != 0
    except ValueError:
        raise invalid from None
    if url.scheme not in {"http", "https"} or not has_host or url.username is not None:
        raise invalid
    return f"{url.scheme}://{url.netloc}{url.path.rstrip('/').removesuffix('/v1')}"


def _is_on_loopback(url: str) -> bool:
    """Return whether a URL names an engine on this machine, with no proxy in front of it."""
    where = urlsplit(url)
    if where.scheme != "http" or where.path:
        return False
    try:
        return ip_address(where.hostname or "").is_loopback
    except ValueError:
        return where.hostname == "localhost"


def _api_key(options: argparse.Namespace) -> str:
    if options.api_key_file is None:
        return ""
    key = _read("--api-key-file", options.api_key_file).strip()
    if not key or not key.isascii() or not key.isprintable():
        raise StartError("--api-key-file", "contains no API key", "name a file with one key")
    return key


class _EngineConnection(HTTPConnection):
    """A connection over the engine's Unix socket ``path``, or over TCP if that cannot be used."""

    def __init__(self, path: Path, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._path = path

    def connect(self) -> None:
        """Connect to the Unix socket, or else over TCP. Raises OSError."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        try:
            self.sock.connect(str(self._path))
        except OSError:  # the engine is older, or this user is not an operator
            self.sock.close()
            super().connect()


class _OverEngineSocket(urllib.request.HTTPHandler):
    """Opens http:// URLs over an engine's Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def http_open(self, request: urllib.request.Request) -> Any:
        """Send a request and return the response."""
        return self.do_open(partial(_EngineConnection, self._path), request)


def _post(url: str, body: Mapping[str, Any], key: str, path: Path | None) -> Any:
    """Return the engine's answer. Raises StartError."""
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    call = urllib.request.Request(  # noqa: S310 - the scheme was checked: http or https
        url + _PATH, json.dumps(body).encode(), headers
    )
    # Ignore proxies from the environment: the engine is nearby.
    handlers = [_OverEngineSocket(path)] if path else []
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), *handlers)
    try:
        with opener.open(call, timeout=_TIMEOUT_S) as reply:
            return json.loads(reply.read(_REPLY_BYTES_MAX))
    except urllib.error.HTTPError as error:
        with error:
            raise _rejection(url, error.code, error.read(_PROMPT_BYTES_MAX)) from None
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        problem = f"cannot reach an engine at {url}: {reason}"
        raise StartError("--engine", problem, "pass --engine http://HOST:PORT") from error
    except (ValueError, RecursionError):
        raise _not_an_engine(url) from None


def _rejection(url: str, status: int, raw: bytes) -> StartError:
    """Return the error for a response with an error status."""
    try:
        reason = " ".join(str(json.loads(raw)["error"]["message"]).split())
    except (ValueError, KeyError, TypeError, RecursionError):
        reason = ""
    if status == 401:
        problem = f"{url} requires an API key: {reason}"
        return StartError("--api-key-file", problem, "name a file with one key")
    if status == 404 and not reason.startswith("model "):
        return _not_an_engine(url)
    return StartError("--engine", f"{url} rejected the request", reason or f"HTTP status {status}")


def _not_an_engine(url: str) -> StartError:
    problem = f"{url} is not a kvtier engine, or an outdated one"
    return StartError("--engine", problem, "give the URL of a `kvtier engine`")


def _parse_answer(url: str, answer: Any) -> HashedPrompt:
    hashes = {"hashes", "unsalted"}
    try:
        return HashedPrompt(
            key_space=bytes.fromhex(answer["key_space"]),
            tenant=bytes.fromhex(answer["tenant"]),
            hashes=bytes.fromhex("".join(answer["hashes"])),
            unsalted=bytes.fromhex("".join(answer["unsalted"])),
            num_tokens=int(answer["num_tokens"]),
            answer={name: each for name, each in answer.items() if name not in hashes},
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise _not_an_engine(url) from None
