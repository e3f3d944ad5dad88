"""``kvtier drop``: empty tiers, of everything or of a selection, and say what was removed."""

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kvtier.cli.call import Target, add_socket_options, ask, socket_of
from kvtier.cli.options import seconds
from kvtier.cli.selection import add_selection_options, selections_of
from kvtier.cli.shown import plain, shown_bytes, wrapped
from kvtier.client.wire import tier_from_wire, tier_to_wire
from kvtier.core.identity import Selection
from kvtier.core.residency import TierName
from kvtier.v1 import operator_pb2 as pb

__all__ = ["add_options", "run"]

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
        line = f"{self.tier:<7} removed {self.blocks} blocks, {shown_bytes(self.bytes)}"
        if self.kept_blocks:
            line += f"; kept {self.kept_blocks} in use"
        line += f"; {plain(self.error)}" if self.error else ""
        engines = [f"{each.engine} (pid {each.pid}): {each.why}" for each in self.keeping]
        return "\n".join([line, *(piece for each in engines for piece in wrapped(each, " " * 8))])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_socket_options(parser)
    parser.add_argument(
        "--tier",
        action="append",
        required=True,
        choices=[*TierName, "all"],
        help="tier to empty; may be repeated",
    )
    add_selection_options(parser)
    parser.add_argument(
        "--timeout", type=seconds, default=10.0, metavar="SECONDS", help="how long to wait"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Empty the tiers; exit code 1 where one could not be emptied."""
    target = socket_of(options)
    reply = ask(target, lambda stub: stub.Stat(pb.StatRequest(), timeout=_MARGIN_S))
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
    reply = ask(target, lambda stub: stub.Drop(request, timeout=timeout_s + _MARGIN_S))
    return list(reply.removed)


def _tiers_here(status: Mapping[str, Any]) -> list[TierName]:
    """Return the tiers that the daemon has; the GPU tier is its engines'."""
    tiers = status["tiers"]
    return [name for name in TierName if name is TierName.GPU or tiers[name]["state"] != "off"]
