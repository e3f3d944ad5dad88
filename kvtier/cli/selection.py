"""Whose blocks a command means: those of a tenant, of a model, of both, or all."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtier.core.identity import HASH_BYTES, Selection, tenant_digest
from kvtier.errors import StartError

__all__ = ["add_selection_options", "selections_of"]

_PREFIX_DIGITS_MIN = 6
_NAMES_SHOWN_MAX = 20


def add_selection_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a tenant or a model."""
    tenant = parser.add_mutually_exclusive_group()
    tenant.add_argument("--tenant", metavar="SALT", help="only blocks with this cache_salt")
    tenant.add_argument(
        "--tenant-key-file",
        type=Path,
        metavar="FILE",
        help="only blocks of the API key in this file (- for standard input), "
        'where engine.tenant_from is "api_key"',
    )
    tenant.add_argument(
        "--tenant-digest",
        metavar="HEX",
        help="only blocks of this tenant, by its digest of 32 digits; zeros: of no tenant",
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--model", metavar="NAME", help="only blocks of engines of this name, as stat shows it"
    )
    model.add_argument(
        "--key-space",
        metavar="HEX",
        help="only blocks of this key space, by its first digits as stat shows them",
    )


def selections_of(options: argparse.Namespace, status: Mapping[str, Any]) -> list[Selection]:
    """Return what is meant, given the daemon's status document; several where a name is shared.

    Raises StartError for a name or a digest that says nothing.
    """
    tenant = _tenant(options)
    spaces = [(bytes.fromhex(each["key_space"]), each["names"]) for each in status["key_spaces"]]
    if options.model is not None:
        if not options.model:  # as with a tenant; it would be the kind of each that has no kind
            raise StartError("--model", "is empty", _known(spaces))
        meant = [digest for digest, names in spaces if any(_is(n, options.model) for n in names)]
        if not meant:
            raise StartError("--model", f"no blocks of {options.model!r} here", _known(spaces))
        return [Selection(digest, tenant) for digest in meant]
    if options.key_space is not None:
        return [Selection(_key_space(options.key_space, spaces), tenant)]
    return [Selection(b"", tenant)]


def _tenant(options: argparse.Namespace) -> bytes:
    if options.tenant is not None:
        if not options.tenant:  # mostly a shell variable that is not set
            raise StartError(
                "--tenant", "is empty", f"give a salt, or --tenant-digest {'0' * 2 * HASH_BYTES}"
            )
        return tenant_digest(options.tenant)
    if options.tenant_key_file is not None:
        from kvtier.api.http.tenant import key_salt

        return tenant_digest(key_salt(_key(options.tenant_key_file)))
    if options.tenant_digest is not None:
        return _digest("--tenant-digest", options.tenant_digest)
    return b""


def _key(path: Path) -> str:
    try:
        key = sys.stdin.readline() if str(path) == "-" else path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(
            "--tenant-key-file", f"{path} cannot be read: {error}", "give a file with the key"
        ) from error
    if not key.strip():
        raise StartError("--tenant-key-file", f"{path} has no key", "give a file with the key")
    return key.strip()


def _digest(option: str, digits: str) -> bytes:
    try:
        digest = bytes.fromhex(digits)
    except ValueError:
        digest = b""
    if len(digest) != HASH_BYTES:
        raise StartError(
            option, f"{digits!r} is no digest", f"give {2 * HASH_BYTES} hexadecimal digits"
        )
    return digest


def _key_space(digits: str, spaces: list[tuple[bytes, list[str]]]) -> bytes:
    """Return a key space by its first digits; one that is not listed by all of them."""
    meant = [digest for digest, _ in spaces if digest.hex().startswith(digits.lower())]
    if len(meant) == 1 and len(digits) >= _PREFIX_DIGITS_MIN:
        return meant[0]
    if len(meant) > 1:
        raise StartError("--key-space", f"{digits!r} begins several", "give more digits")
    if len(digits) == 2 * HASH_BYTES:
        return _digest("--key-space", digits)
    problem = f"{digits!r} begins none" if len(digits) >= _PREFIX_DIGITS_MIN else "is too short"
    remedy = f"give {_PREFIX_DIGITS_MIN} digits or more, as `kvtier stat` shows them"
    raise StartError("--key-space", problem, remedy)


def _is(name: str, wanted: str) -> bool:
    """Tell whether an engine's name is the wanted one, with or without its kind before it."""
    return wanted in {name, name.partition(" ")[2]}


def _known(spaces: list[tuple[bytes, list[str]]]) -> str:
    names = sorted({name for _, names in spaces for name in names})
    shown = ", ".join(repr(name) for name in names[:_NAMES_SHOWN_MAX])
    return f"known are {shown}" if names else "no engine has been here"
