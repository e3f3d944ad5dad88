"""``kvtier fsck`` on a store that a daemon has open: the daemon itself verifies every block."""

import json
import sys
import time

from kvtier.cli.call import Target, ask
from kvtier.cli.shown import shown_bytes, shown_count
from kvtier.v1 import operator_pb2 as pb
from kvtier.v1 import operator_pb2_grpc

__all__ = ["fsck_running"]

_PROGRESS_PERIOD_S = 2.0


def fsck_running(target: Target, timeout_s: float, *, is_json: bool) -> int:
    """Have the daemon verify its whole SSD tier, and print what it saw; returns the exit code.

    Loads go first, so on a busy node this takes its time. Damaged blocks are quarantined, which is
    all the repair there is: they may be stored again at once. Raises StartError where the daemon
    cannot do it.
    """
    seen, num_quarantined = ask(target, lambda stub: _follow(stub, timeout_s))
    if is_json:
        document = {
            "blocks": seen.blocks,
            "bytes": seen.bytes,
            "damaged_blocks": seen.damaged_blocks,
            "expired_blocks": seen.expired_blocks,
            "damaged": list(seen.damaged),
            "quarantined_since_start": num_quarantined,
        }
        print(json.dumps(document))
        return 0
    print(f"verified {shown_count(seen.blocks)} blocks, {shown_bytes(seen.bytes)}")
    if seen.expired_blocks:
        print(f"forgot {shown_count(seen.expired_blocks)} blocks because of their age")
    if seen.damaged_blocks:
        print(f"quarantined {shown_count(seen.damaged_blocks)} damaged blocks:")
        for block_hash in seen.damaged:
            print(f"  {block_hash}")
    else:
        print("no block is damaged")
    if num_quarantined:
        print(f"quarantined since the daemon's start: {shown_count(num_quarantined)}")
    return 0


def _follow(stub: operator_pb2_grpc.OperatorStub, timeout_s: float) -> tuple[pb.FsckReply, int]:
    """Return the last message and the blocks quarantined so far, by whomever.

    Shows the other messages to a person who waits.
    """
    seen = pb.FsckReply()
    shown_s = time.monotonic()
    for seen in stub.Fsck(pb.FsckRequest(), timeout=timeout_s):
        now_s = time.monotonic()
        if sys.stderr.isatty() and now_s - shown_s >= _PROGRESS_PERIOD_S:
            shown_s = now_s
            line = f"{shown_count(seen.blocks)} of about {shown_count(seen.blocks_in_all)} blocks"
            print(line, file=sys.stderr)
    status = json.loads(stub.Stat(pb.StatRequest(), timeout=timeout_s).json)
    detail = status["tiers"]["ssd"].get("detail", {})  # it may be detached by now
    return seen, detail.get("quarantined_blocks", 0)
