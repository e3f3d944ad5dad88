"""Which prompt a command means: given as text, as messages or as tokens, and hashed by an engine.

Only an engine knows how text becomes tokens, and tokens block hashes; see ``api.http.chain``.
"""

import argparse
import json
import socket
import sys
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
from kvtier.cli.options import config_from
from kvtier.core.identity import HASH_BYTES
from kvtier.errors import StartError, reason_of
from kvtier.v1 import engine_pb2 as pb

__all__ = ["HashedPrompt", "add_prompt_options", "has_prompt", "prompt_from", "require_utf8"]

_TIMEOUT_S = 60.0
"""For a prompt of a million tokens, which takes a tokenizer half a minute."""

_PROMPT_BYTES_MAX = 16 << 20
"""What an engine takes as a body."""

_REPLY_BYTES_MAX = 64 << 20
_PATH = "/v1/kvtier/chain"


@dataclass(frozen=True, slots=True)
class HashedPrompt:
    """A prompt as the daemon knows it, and what the engine said of it."""

    key_space: bytes
    tenant: bytes
    hashes: bytes
    unsalted: bytes
    num_tokens: int
    told: Mapping[str, Any]
    """The engine's answer without the hashes."""

    @property
    def num_blocks(self) -> int:
        """Return how many full blocks it has."""
        return len(self.hashes) // HASH_BYTES

    @property
    def message(self) -> pb.Chain:
        """Return it as calls name it."""
        return pb.Chain(tenant=self.tenant, hashes=self.hashes)


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a prompt, and the engine that reads it."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--prompt", metavar="TEXT|@FILE", help="a prompt: its text, or @ and a file (@- stdin)"
    )
    what.add_argument(
        "--messages", metavar="FILE", help="a conversation: a JSON list of messages (- stdin)"
    )
    what.add_argument(
        "--tokens", metavar="FILE", help="token ids: a JSON list, or one a line (- stdin)"
    )
    parser.add_argument("--salt", metavar="SALT", help="the cache_salt it was sent with")
    parser.add_argument(
        "--engine", metavar="URL", help="an engine of that model (http:// and engine.listen)"
    )
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="the API key to show to the engine"
    )


def has_prompt(options: argparse.Namespace) -> bool:
    """Tell whether the command line names a prompt."""
    return any(each is not None for each in (options.prompt, options.messages, options.tokens))


def prompt_from(
    options: argparse.Namespace, *, with_text: bool = False, daemon: Path | None = None
) -> HashedPrompt:
    """Return the chain of the prompt that the options name. Raises StartError.

    ``daemon`` is the path of the daemon's socket. If it is given, the engine is asked over its own
    Unix socket beside it, where it also answers what is for operators only.
    """
    if not has_prompt(options):
        raise StartError("--prompt", "is not given", "name one: --prompt, --messages or --tokens")
    body = _body(options) | ({"with_text": True} if with_text else {})
    if options.salt is not None:
        if not options.salt:  # mostly a shell variable that is not set
            raise StartError("--salt", "is empty", "give a salt, or leave the option out")
        body["cache_salt"] = require_utf8("--salt", options.salt)
    url = _engine(options)
    path = None
    if daemon is not None and (options.engine is None or _is_on_loopback(url)):
        path = engine_socket(daemon, urlsplit(url).port or 80)
    return _named(url, _asked(url, body, _key(options), path))


def _body(options: argparse.Namespace) -> dict[str, Any]:
    if options.prompt is not None:
        given: str = options.prompt
        text = _read("--prompt", given[1:]) if given.startswith("@") else given
        if not text:
            raise StartError("--prompt", "is empty", "give a text, or @FILE")
        return {"prompt": require_utf8("--prompt", text)}
    if options.messages is not None:
        messages = _parsed("--messages", _read("--messages", options.messages))
        if isinstance(messages, dict):  # a whole request, as clients log it
            messages = messages.get("messages")
        if not isinstance(messages, list):
            raise StartError("--messages", "are no list", 'give [{"role": …, "content": …}, …]')
        return {"messages": messages}
    text = _read("--tokens", options.tokens)
    if text.lstrip().startswith("["):
        return {"token_ids": _parsed("--tokens", text)}
    try:
        return {"token_ids": [int(word) for word in text.replace(",", " ").split()]}
    except ValueError:
        raise StartError("--tokens", "are no numbers", "give a JSON list, or one a line") from None


def require_utf8(option: str, given: str) -> str:
    """Return a text of the command line. Raises StartError for bytes that are none."""
    try:
        given.encode()
    except UnicodeEncodeError:
        raise StartError(option, "is no text in UTF-8", "give text") from None
    return given


def _read(option: str, path: str) -> str:
    """Return the content of a file, or of standard input for ``-``."""
    try:
        if path == "-":
            raw = sys.stdin.buffer.read(_PROMPT_BYTES_MAX + 1)
        else:
            with Path(path).open("rb") as file:
                raw = file.read(_PROMPT_BYTES_MAX + 1)
        text = raw.decode()
    except OSError as error:
        named = path or "a file without a name"
        raise StartError(
            option, f"{named} cannot be read: {reason_of(error)}", "give a file"
        ) from error
    except UnicodeDecodeError:
        raise StartError(option, f"{path} is no text in UTF-8", "give a text file") from None
    if len(raw) > _PROMPT_BYTES_MAX:
        raise StartError(option, f"{path} is over {_PROMPT_BYTES_MAX} bytes", "give a prompt")
    return text


def _parsed(option: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StartError(option, f"is no JSON: {error}", "give a JSON list") from None


def _engine(options: argparse.Namespace) -> str:
    """Return the URL of the engine, without the path of its API."""
    given: str | None = options.engine
    if given is None:
        return f"http://{config_from(options).engine.listen}"
    wrong = StartError("--engine", f"{given!r} is no URL", "give http://HOST:PORT")
    try:
        where = urlsplit(given)
        is_place = bool(where.hostname) and where.port != 0
    except ValueError:
        raise wrong from None
    if where.scheme not in {"http", "https"} or not is_place or where.username is not None:
        raise wrong
    return f"{where.scheme}://{where.netloc}{where.path.rstrip('/').removesuffix('/v1')}"


def _is_on_loopback(url: str) -> bool:
    """Tell whether a URL names an engine on this machine, with no proxy in front of it."""
    where = urlsplit(url)
    if where.scheme != "http" or where.path:
        return False
    try:
        return ip_address(where.hostname or "").is_loopback
    except ValueError:
        return where.hostname == "localhost"


def _key(options: argparse.Namespace) -> str:
    if options.api_key_file is None:
        return ""
    key = _read("--api-key-file", str(options.api_key_file)).strip()
    if not key or not key.isascii() or not key.isprintable():
        raise StartError("--api-key-file", "has no key", "give a file with one key")
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


def _asked(url: str, body: Mapping[str, Any], key: str, path: Path | None) -> Any:
    """Return what the engine answers. Raises StartError."""
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    call = urllib.request.Request(  # noqa: S310 - http or https, as was checked
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
            raise _refusal(url, error.code, error.read(_PROMPT_BYTES_MAX)) from None
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise StartError(
            "--engine", f"no engine answers at {url}: {reason}", "give --engine http://HOST:PORT"
        ) from error
    except (ValueError, RecursionError):
        raise _stranger(url) from None


def _refusal(url: str, status: int, raw: bytes) -> StartError:
    """Return the error that the engine gave as its reason for refusing the request."""
    try:
        said = " ".join(str(json.loads(raw)["error"]["message"]).split())
    except (ValueError, KeyError, TypeError, RecursionError):
        said = ""
    if status == 401:
        return StartError(
            "--api-key-file",
            f"{url} wants an API key: {said}",
            "give a file with one",
        )
    if status == 404 and not said.startswith("there is no model"):
        return _stranger(url)
    return StartError("--engine", f"{url} refuses: {said or status}", "do as it says")


def _stranger(url: str) -> StartError:
    return StartError(
        "--engine", f"{url} is no kvtier engine, or one too old", "give that of `kvtier engine`"
    )


def _named(url: str, told: Any) -> HashedPrompt:
    try:
        return HashedPrompt(
            key_space=bytes.fromhex(told["key_space"]),
            tenant=bytes.fromhex(told["tenant"]),
            hashes=bytes.fromhex("".join(told["hashes"])),
            unsalted=bytes.fromhex("".join(told["unsalted"])),
            num_tokens=int(told["num_tokens"]),
            told={name: each for name, each in told.items() if name not in {"hashes", "unsalted"}},
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise _stranger(url) from None
