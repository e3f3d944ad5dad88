"""``kvtier fsck``: verifies every block of an SSD store, and repairs what can be repaired.

With ``--connect``, a running daemon verifies the store that it has open.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from kvtier.cli.call import Target, add_target_options, call_daemon, target_from
from kvtier.cli.formatting import count_noun, format_bytes, format_count
from kvtier.cli.options import config_from, parse_wait
from kvtier.config import Config
from kvtier.errors import StartError
from kvtier.tiers.seal import KeyRing, Seal, SealMode
from kvtier.tiers.ssd.directory import DirectoryLock
from kvtier.tiers.ssd.disk import DirectIO, Disk
from kvtier.tiers.ssd.fsck import Fsck, FsckPurpose, FsckReport
from kvtier.tiers.ssd.segment import segment_number
from kvtier.tiers.ssd.settings import ssd_settings
from kvtier.v1 import operator_pb2 as pb
from kvtier.v1 import operator_pb2_grpc

__all__ = ["add_options", "fsck_running", "run"]

_PROGRESS_PERIOD_S = 2.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_target_options(
        parser,
        ("--directory", "ssd.directory", "store to verify; no daemon may have it open"),
        ("--key-file", "seal.key_file", "file with the keys of an encrypted store"),
    )
    parser.add_argument(
        "--repair", action="store_true", help="fix what can be fixed (default: change nothing)"
    )
    parser.add_argument(
        "--remove-set-aside",
        action="store_true",
        help="remove files of other kvtier versions, which --repair keeps",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--timeout",
        type=parse_wait,
        default=3600.0,
        metavar="TIME",
        help="with --connect: how long to wait (default: 1h)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Verify a store; exit code 1 if faults remain or not everything could be verified."""
    if options.connect is not None:
        _refuse_for_running(options)
        return fsck_running(target_from(options), options.timeout, is_json=options.json)
    config = config_from(options)
    purpose = FsckPurpose.REPAIR if options.repair else FsckPurpose.CHECK
    report = _checked(config, purpose, keeps_others=not options.remove_set_aside)
    if options.json:
        document = _document(report) | {
            "capacity_bytes": ssd_settings(config).capacity_bytes,
            "faults": report.num_faults,
        }
        print(json.dumps(document))
    else:
        print("\n".join(_lines(report, ssd_settings(config).capacity_bytes, purpose)))
    left = report.num_left if options.repair else report.num_faults
    return int(left + report.unchecked_records > 0)


def _refuse_for_running(options: argparse.Namespace) -> None:
    """Reject options that a running daemon does not need."""
    remedies = {
        ("--repair", "repair"): "omit it: a daemon quarantines damaged blocks anyway",
        ("--remove-set-aside", "remove_set_aside"): "omit it, or stop the daemon first",
        ("--key-file", "key:seal.key_file"): "omit it",
        ("--directory", "key:ssd.directory"): "omit it",
    }
    for (option, name), remedy in remedies.items():
        if getattr(options, name) not in (None, False):
            raise StartError(option, "not valid with --connect", remedy)


def _document(report: FsckReport) -> dict[str, Any]:
    values = {field.name: getattr(report, field.name) for field in fields(report)}
    return {
        name: dict(value) if isinstance(value, Counter) else value for name, value in values.items()
    }


def _checked(config: Config, purpose: FsckPurpose, *, keeps_others: bool) -> FsckReport:
    """Lock the store and verify it. Raises StartError if it is not a store, or in use."""
    directory = ssd_settings(config).directory
    _require_store(directory)
    ring = KeyRing.load(config.seal.key_file) if config.seal.key_file else None
    lock = DirectoryLock(directory)
    try:
        disk = Disk(directory, DirectIO.OFF)
        seal = Seal(SealMode.OFF, ring, "ssd")
        return Fsck(disk, seal, purpose, keeps_others=keeps_others).run(_note_progress)
    except OSError as error:
        raise StartError(
            "ssd.directory", f"{directory}: {error.strerror}", "make it readable by this user"
        ) from error
    finally:
        lock.release()


def _require_store(directory: Path) -> None:
    """Reject other directories, so that a mistyped name creates nothing."""
    try:
        names = [path for path in directory.iterdir() if segment_number(path) is not None]
        is_store = bool(names) or (directory / "lock").exists()
    except OSError as error:
        raise StartError(
            "ssd.directory", f"{directory}: {error.strerror}", "name the directory of a store"
        ) from None
    if not is_store:
        raise StartError(
            "ssd.directory", f"no store in {directory}", "name the directory of a store"
        )


def _note_progress(num_done: int, num_files: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{num_done} of {num_files} files", end="\r", file=sys.stderr)


def _lines(report: FsckReport, capacity_bytes: int, purpose: FsckPurpose) -> Iterator[str]:
    yield (
        f"{format_count(report.segments)} segments, {format_count(report.records)} records, "
        f"{format_count(report.live_blocks)} blocks of {format_bytes(report.live_bytes)}; "
        f"{format_bytes(report.used_bytes)} of {format_bytes(capacity_bytes)} used"
    )
    notes = {
        "deleted-block records": report.removed_records,
        "quarantined records": report.quarantined_records,
        "records with unknown keys": report.unchecked_records,
        "other files": report.foreign_files,
    }
    faults = {
        **{f"damaged records ({why})": count for why, count in report.damaged_records.items()},
        "duplicate records": report.duplicate_records,
        "missing footers": report.footers_missing,
        "wrong footers": report.footers_wrong,
        "unreachable bytes": report.unreachable_bytes,
        "truncated files": report.files_cut_short,
        "files that are not segments": report.unreadable_files,
        "unreadable records": report.unreadable_records,
    }
    yield from (f"{name}: {format_count(count)}" for name, count in notes.items() if count)
    if report.set_aside_files:
        size = format_bytes(report.set_aside_bytes)
        yield f"files of another version set aside: {format_count(report.set_aside_files)}, {size}"
        if "files of another version removed" not in report.repaired:
            yield "  that version can still read them; --remove-set-aside removes them"
    yield from (f"FAULT {name}: {format_count(count)}" for name, count in faults.items() if count)
    yield from (f"FAILED {line}" for line in report.failed)
    yield from (f"repaired: {name}: {count}" for name, count in report.repaired.items())
    if report.unchecked_records:
        yield "not everything was verified: pass --key-file, or --config with seal.key_file"
    elif not report.num_faults:
        yield "clean"
    if report.num_faults and purpose is FsckPurpose.CHECK:
        yield "nothing was changed; --repair fixes what can be fixed"


def fsck_running(target: Target, timeout_s: float, *, is_json: bool) -> int:
    """Let the daemon verify its whole SSD tier, and print the result; returns the exit code.

    Loads go first, so this is slow on a busy node. Damaged blocks are quarantined; nothing else
    needs repair, since they can be stored again at once. Raises StartError.
    """
    seen, num_quarantined = call_daemon(target, lambda stub: _follow(stub, timeout_s))
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
    print(f"verified {count_noun(seen.blocks, 'block')}, {format_bytes(seen.bytes)}")
    if seen.expired_blocks:
        print(f"removed {count_noun(seen.expired_blocks, 'expired block')}")
    if seen.damaged_blocks:
        print(f"quarantined {count_noun(seen.damaged_blocks, 'damaged block')}:")
        for block_hash in seen.damaged:
            print(f"  {block_hash}")
    else:
        print("no damaged blocks")
    if num_quarantined:
        print(f"quarantined since the daemon started: {format_count(num_quarantined)}")
    return 0


def _follow(stub: operator_pb2_grpc.OperatorStub, timeout_s: float) -> tuple[pb.FsckReply, int]:
    """Return the last message, and the blocks quarantined since the daemon started.

    Prints progress on a terminal.
    """
    seen = pb.FsckReply()
    printed_s = time.monotonic()
    for seen in stub.Fsck(pb.FsckRequest(), timeout=timeout_s):
        now_s = time.monotonic()
        if sys.stderr.isatty() and now_s - printed_s >= _PROGRESS_PERIOD_S:
            printed_s = now_s
            line = f"{format_count(seen.blocks)} of about {format_count(seen.blocks_in_all)} blocks"
            print(line, file=sys.stderr)
    status = json.loads(stub.Stat(pb.StatRequest(), timeout=timeout_s).json)
    detail = status["tiers"]["ssd"].get("detail", {})  # it may have been detached
    return seen, detail.get("quarantined_blocks", 0)
