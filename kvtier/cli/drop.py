"""``kvtier drop``: removes blocks from tiers, all of them or a selection."""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvtier.cli.call import Target, add_target_options, call_daemon, fetch_status, target_from
from kvtier.cli.files import read_text
from kvtier.cli.formatting import count_noun, format_bytes, printable, wrap_lines
from kvtier.cli.options import add_timeout_option
from kvtier.core.identity import HASH_BYTES, Selection, tenant_digest
from kvtier.core.residency import TierName
from kvtier.errors import StartError
from kvtier.v1 import operator_pb2 as pb
from kvtier.wire.convert import tier_from_wire, tier_to_wire

__all__ = ["add_options", "run"]

_MARGIN_S = 2.0
_PREFIX_DIGITS_MIN = 6
_NAMES_SHOWN_MAX = 20
_DIGITS = 2 * HASH_BYTES
_KEY_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class _Engine:
    """An engine that did not empty its GPU tier."""

    engine: str
    pid: int
    why: str


@dataclass(slots=True)
class _Result:
    """What was removed from one tier."""

    tier: str
    blocks: int = 0
    bytes: int = 0
    kept_blocks: int = 0
    error: str = ""
    keeping: list[_Engine] = field(default_factory=list)

    def add(self, removed: pb.DropReply.Removed) -> None:
        """Add the result of one call."""
        self.blocks += removed.blocks
        self.bytes += removed.bytes
        self.kept_blocks += removed.kept_blocks
        self.error = self.error or removed.error
        engines = [_Engine(each.engine, each.pid, each.why) for each in removed.keeping]
        self.keeping += [each for each in engines if each not in self.keeping]

    def __str__(self) -> str:
        blocks = count_noun(self.blocks, "block")
        line = f"{self.tier:<7} removed {blocks}, {format_bytes(self.bytes)}"
        if self.kept_blocks:
            line += f"; kept {self.kept_blocks} in use"
        line += f"; {printable(self.error)}" if self.error else ""
        engines = [f"{each.engine} (pid {each.pid}): {each.why}" for each in self.keeping]
        return "\n".join([line, *(part for each in engines for part in wrap_lines(each, " " * 8))])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_target_options(parser)
    parser.add_argument(
        "--tier",
        action="append",
        required=True,
        choices=[*(tier.value for tier in TierName), "all"],
        help="tier to remove blocks from; may be repeated",
    )
    tenant = parser.add_mutually_exclusive_group()
    tenant.add_argument("--tenant", metavar="SALT", help="only blocks with this cache_salt")
    tenant.add_argument(
        "--tenant-key-file",
        type=Path,
        metavar="FILE",
        help="only blocks of the API key in this file (-: standard input); requires "
        'engine.tenant_from = "api_key"',
    )
    tenant.add_argument(
        "--tenant-digest",
        metavar="HEX",
        help=f"only blocks of the tenant with this digest ({_DIGITS} hex digits; zeros: no tenant)",
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--model", metavar="NAME", help="only blocks of this model, named as in `kvtier stat`"
    )
    model.add_argument(
        "--key-space",
        metavar="HEX",
        help="only blocks of this key space, by the first digits that `kvtier stat` shows",
    )
    add_timeout_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Remove blocks; exit code 1 if some could not be removed."""
    target = target_from(options)
    status = fetch_status(target, _MARGIN_S)
    selections = _selections(options, status)
    tiers = _enabled_tiers(status) if "all" in options.tier else [*map(TierName, options.tier)]
    results = {tier: _Result(tier.value) for tier in tiers}
    until_s = time.monotonic() + options.timeout
    for selection in selections:
        for removed in _drop(target, tiers, selection, max(0.0, until_s - time.monotonic())):
            results[tier_from_wire(removed.tier)].add(removed)
    if options.json:
        print(json.dumps({"removed": [asdict(result) for result in results.values()]}))
    else:
        print("\n".join(map(str, results.values())))
    return int(any(result.error or result.kept_blocks for result in results.values()))


def _drop(
    target: Target, tiers: Sequence[TierName], selection: Selection, timeout_s: float
) -> Sequence[pb.DropReply.Removed]:
    request = pb.DropRequest(
        tiers=map(tier_to_wire, tiers),
        deadline_ms=max(1, int(timeout_s * 1000)),
        key_space=selection.key_space,
        tenant=selection.tenant,
    )
    reply = call_daemon(target, lambda stub: stub.Drop(request, timeout=timeout_s + _MARGIN_S))
    return list(reply.removed)


def _enabled_tiers(status: Mapping[str, Any]) -> list[TierName]:
    """Return the GPU tier, which belongs to the engines, and the daemon's tiers."""
    tiers = status["tiers"]
    return [name for name in TierName if name is TierName.GPU or tiers[name]["state"] != "off"]


def _selections(options: argparse.Namespace, status: Mapping[str, Any]) -> list[Selection]:
    """Return the selected blocks; several selections if key spaces share a model's name.

    Raises StartError for an unknown name or digest.
    """
    tenant = _tenant(options)
    spaces = [(bytes.fromhex(each["key_space"]), each["names"]) for each in status["key_spaces"]]
    if options.model is not None:
        if not options.model:  # would match names without a kind; mostly an unset shell variable
            raise StartError("--model", "is empty", _known_models(spaces))
        matches = [
            digest
            for digest, names in spaces
            if any(options.model in {name, name.partition(" ")[2]} for name in names)
        ]
        if not matches:
            problem = f"no blocks of model {options.model!r}"
            raise StartError("--model", problem, _known_models(spaces))
        return [Selection(digest, tenant) for digest in matches]
    if options.key_space is not None:
        return [Selection(_key_space(options.key_space, spaces), tenant)]
    return [Selection(b"", tenant)]


def _tenant(options: argparse.Namespace) -> bytes:
    if options.tenant is not None:
        if not options.tenant:  # mostly an unset shell variable
            raise StartError(
                "--tenant", "is empty", f"give a salt, or --tenant-digest {'0' * _DIGITS}"
            )
        return tenant_digest(options.tenant)
    if options.tenant_key_file is not None:
        from kvtier.api.http.tenant import key_salt

        return tenant_digest(key_salt(_api_key(options.tenant_key_file)))
    if options.tenant_digest is not None:
        return _digest("--tenant-digest", options.tenant_digest)
    return b""


def _api_key(path: Path) -> str:
    option = "--tenant-key-file"
    is_stdin = str(path) == "-"  # one line: it may be a terminal
    key = sys.stdin.readline() if is_stdin else read_text(option, path, _KEY_BYTES_MAX)
    if not key.strip():
        raise StartError(option, f"{path} contains no API key", "name a file with one key")
    return key.strip()


def _digest(option: str, digits: str) -> bytes:
    try:
        digest = bytes.fromhex(digits)
    except ValueError:
        digest = b""
    if len(digest) != HASH_BYTES:
        raise StartError(
            option, f"{digits!r} is not a digest", f"give {_DIGITS} hexadecimal digits"
        )
    return digest


def _key_space(digits: str, spaces: Sequence[tuple[bytes, Sequence[str]]]) -> bytes:
    """Return a key space by its first digits; an unlisted one needs all digits."""
    option, remedy = "--key-space", f"give at least {_PREFIX_DIGITS_MIN} digits from `kvtier stat`"
    matches = [digest for digest, _ in spaces if digest.hex().startswith(digits.lower())]
    if len(matches) == 1 and len(digits) >= _PREFIX_DIGITS_MIN:
        return matches[0]
    if len(matches) > 1:
        raise StartError(option, f"{digits!r} matches several key spaces", "give more digits")
    if len(digits) == _DIGITS:
        return _digest(option, digits)
    if len(digits) >= _PREFIX_DIGITS_MIN:
        raise StartError(option, f"{digits!r} matches no key space", remedy)
    raise StartError(option, f"{digits!r} is too short", remedy)


def _known_models(spaces: Sequence[tuple[bytes, Sequence[str]]]) -> str:
    names = sorted({name for _, names in spaces for name in names})
    if not names:
        return "no engine has attached yet"
    return f"known models: {', '.join(map(repr, names[:_NAMES_SHOWN_MAX]))}"
