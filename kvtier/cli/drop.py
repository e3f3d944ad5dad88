"""``kvtier drop``: empty tiers, of everything or of a selection, and say what was removed."""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvtier.cli.call import Target, add_target_options, call_daemon, target_from
from kvtier.cli.formatting import format_bytes, printable, wrap_lines
from kvtier.cli.options import parse_wait
from kvtier.core.identity import HASH_BYTES, Selection, tenant_digest
from kvtier.core.residency import TierName
from kvtier.errors import StartError
from kvtier.v1 import operator_pb2 as pb
from kvtier.wire.convert import tier_from_wire, tier_to_wire

__all__ = ["add_options", "add_selection_options", "run", "selections_of"]

_MARGIN_S = 2.0


@dataclass(frozen=True, slots=True)
class _Engine:
    """One that did not empty its own tier."""

    engine: str
    pid: int
    why: str


@dataclass(slots=True)
class _Result:
    """What became of one tier."""

    tier: str
    blocks: int = 0
    bytes: int = 0
    kept_blocks: int = 0
    error: str = ""
    keeping: list[_Engine] = field(default_factory=list)

    def add(self, removed: pb.DropReply.Removed) -> None:
        """Count one call's part."""
        self.blocks += removed.blocks
        self.bytes += removed.bytes
        self.kept_blocks += removed.kept_blocks
        self.error = self.error or removed.error
        engines = [_Engine(each.engine, each.pid, each.why) for each in removed.keeping]
        self.keeping += [each for each in engines if each not in self.keeping]

    def __str__(self) -> str:
        line = f"{self.tier:<7} removed {self.blocks} blocks, {format_bytes(self.bytes)}"
        if self.kept_blocks:
            line += f"; kept {self.kept_blocks} in use"
        line += f"; {printable(self.error)}" if self.error else ""
        engines = [f"{each.engine} (pid {each.pid}): {each.why}" for each in self.keeping]
        return "\n".join(
            [line, *(piece for each in engines for piece in wrap_lines(each, " " * 8))]
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_target_options(parser)
    parser.add_argument(
        "--tier",
        action="append",
        required=True,
        choices=[*TierName, "all"],
        help="tier to empty; may be repeated",
    )
    add_selection_options(parser)
    parser.add_argument(
        "--timeout", type=parse_wait, default=10.0, metavar="SECONDS", help="how long to wait"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Empty the tiers; exit code 1 where one could not be emptied."""
    target = target_from(options)
    reply = call_daemon(target, lambda stub: stub.Stat(pb.StatRequest(), timeout=_MARGIN_S))
    status = json.loads(reply.json)
    selections = selections_of(options, status)
    names = _tiers_here(status) if "all" in options.tier else [*map(TierName, options.tier)]
    results = {name: _Result(name.value) for name in names}
    until_s = time.monotonic() + options.timeout
    for selection in selections:
        for removed in _drop(target, names, selection, max(0.0, until_s - time.monotonic())):
            results[tier_from_wire(removed.tier)].add(removed)
    if options.json:
        print(json.dumps({"removed": [asdict(result) for result in results.values()]}))
    else:
        for result in results.values():
            print(result)
    return int(any(result.error or result.kept_blocks for result in results.values()))


def _drop(
    target: Target, names: list[TierName], selection: Selection, timeout_s: float
) -> list[pb.DropReply.Removed]:
    request = pb.DropRequest(
        tiers=map(tier_to_wire, names),
        deadline_ms=max(1, int(timeout_s * 1000)),
        key_space=selection.key_space,
        tenant=selection.tenant,
    )
    reply = call_daemon(target, lambda stub: stub.Drop(request, timeout=timeout_s + _MARGIN_S))
    return list(reply.removed)


def _tiers_here(status: Mapping[str, Any]) -> list[TierName]:
    """Return the tiers that the daemon has; the GPU tier is its engines'."""
    tiers = status["tiers"]
    return [name for name in TierName if name is TierName.GPU or tiers[name]["state"] != "off"]


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
