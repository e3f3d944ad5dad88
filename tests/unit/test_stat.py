"""The status as text: 80 columns, whatever the numbers and names are, with the worth on top."""

import copy
from typing import Any

import pytest

from kvtier.cli.stat import stat_text
from kvtier.core.fate import Fate
from kvtier.core.plan import PlanReason
from kvtier.observe.daemon_metrics import TRANSFER_ROUTES

HUGE = 10**10


def tier(blocks: int = 0) -> dict[str, Any]:
    return {
        "state": "up",
        "reason": "",
        "capacity_bytes": blocks * 8192,
        "used_bytes": blocks * 8192,
        "blocks": blocks,
        "tokens": blocks * 64,
        "hit_tokens": 0,
    }


def grown() -> dict[str, Any]:
    """Return by how much its counters have grown."""
    return {
        **dict.fromkeys(("seconds", "saved_s", "lost_s", "actual_s", "first_token_s"), 0.0),
        **dict.fromkeys(("asked_tokens", "found_tokens", "first_tokens", "restored_bytes"), 0),
        "served_tokens": dict.fromkeys(("gpu", "cpu", "ssd", "remote"), 0),
        "moved_bytes": dict.fromkeys(TRANSFER_ROUTES, 0),
        "decisions": {},
        "missed_blocks": {},
    }


def document() -> dict[str, Any]:
    """Return the status of a daemon that has just started."""
    return {
        "version": "0.1.0",
        "boot": "00ff" * 4,
        "pid": 4_194_304,
        "time_s": 1_796_000_000.0,
        "uptime_s": 1.0,
        "config": {"file": "", "reloads": 0, "last_reload": None},
        "worth": {
            "saved_s": 0.0,
            "saved_measured_s": 0.0,
            "lost_s": 0.0,
            "regret_s": 0.0,
            "regret_by_road_s": {"restore": 0.0, "recompute": 0.0},
            "tiers": {name: {"saved_s": 0.0, "lost_s": 0.0} for name in ("cpu", "ssd", "remote")},
            "decisions": {},
            "predicted_s": {"restore": 0.0, "first_token": 0.0},
            "actual_s": {"restore": 0.0, "first_token": 0.0},
            "missed_blocks": {},
            "refused_blocks": {"cpu": {}, "ssd": {}, "remote": {}},
        },
        "grown": {"lately": grown(), "minute": grown()},
        "tiers": {name: tier() for name in ("gpu", "cpu", "ssd", "remote")},
        "key_spaces": [],
        "tokens": {
            "asked": 0,
            "found": {"cpu": 0, "ssd": 0, "remote": 0},
            "absent": 0,
            "left": {},
            "ordered": 0,
            "loaded": {"cpu": 0, "ssd": 0, "remote": 0},
            "unloaded": {},
        },
        "lookup_blocks": {"hit": {"cpu": 0, "ssd": 0, "remote": 0}, "miss": 0},
        "miss_reasons": {},
        "probed_lookups": {},
        "transfers": {
            route: {"bytes": 0, "failed_bytes": 0, "seconds": 0.0, "count": 0}
            for route in TRANSFER_ROUTES
        },
        "policy": {
            "eviction": "rd-sec",
            "remembered_blocks": 0,
            "retained_bytes": 0,
            "gates": {},
            "classes": [],
        },
        "cost": {"routes": {}, "engines": {}, "unmeasured": {}, "guarded": []},
        "background_faults": {},
        "engines": [],
        "requests": [],
        "leases": 0,
        "pins": 0,
    }


def busy() -> dict[str, Any]:
    """Return the status of a daemon that has seen everything, with large numbers."""
    full = document()
    worth = full["worth"]
    worth |= {"saved_s": 123_456.7, "lost_s": 89.1, "regret_s": 1234.5}
    worth["saved_measured_s"] = 3_456.7
    worth["tiers"] = {
        name: {"saved_s": 41_000.0, "lost_s": 30.0} for name in ("cpu", "ssd", "remote")
    }
    worth["decisions"] = {reason.value: HUGE for reason in PlanReason}
    worth["predicted_s"] = {"restore": 1234.0, "first_token": 98_765.0}
    worth["actual_s"] = {"restore": 1250.0, "first_token": 98_000.0}
    worth["missed_blocks"] = {fate.value: HUGE for fate in Fate}
    worth["refused_blocks"]["ssd"] = {"budget": HUGE, "worth": HUGE, "full": HUGE}
    full["policy"] |= {"remembered_blocks": HUGE, "retained_bytes": HUGE}
    full["policy"]["gates"] = {
        name: {"share": 0.333, "threshold": 0.1, "offered_blocks": HUGE, "taken_blocks": HUGE}
        for name in ("ssd", "remote")
    }
    full["policy"]["classes"] = [
        {
            "tenant": "0123456789abcdef" * 2,
            "kind": f"kind-{number}-of-a-rather-long-name"[:32],
            "continues": "unlikely",
            "requests": HUGE,
            "max_offload_tokens": 1_048_576,
            "depths": [
                {"from_tokens": at, "stored_blocks": HUGE, "reused_blocks": 2 * HUGE}
                for at in range(19)
            ],
        }
        for number in range(64)
    ]
    full["cost"] = {
        "routes": {
            name: {
                "start_s": 59.9,
                "per_block_s": 9.99,
                "bytes_per_s": HUGE,
                "p95_over_mean": 999.9,
                "samples": HUGE,
            }
            for name in ("cpu_to_gpu", "gpu_to_cpu", "ssd_to_cpu", "remote_to_cpu")
        },
        "engines": {
            f"{number:032x}": {
                "tokens_per_s": 12_345_678.9,
                "floor_s": 1.234,
                "step_s": 1.234,
                "per_token_s": 1e-5,
                "per_attended_s": 1e-9,
                "p95_over_mean": 999.9,
                "samples": HUGE,
            }
            for number in range(64)
        },
        "unmeasured": {"ssd": "0 KiB of ssd.capacity are free, but 8200 KiB are needed"},
        "guarded": ["remote", "ssd"],
    }
    return full


@pytest.mark.parametrize("make", [document, busy], ids=["fresh", "busy"])
def test_no_line_is_wider_than_a_terminal(make: Any) -> None:
    text = stat_text(make())
    wide = [line for line in text.splitlines() if len(line) > 80]
    assert not wide
    assert "\n\n\n" not in text


def test_what_it_is_worth_stands_on_top() -> None:
    lines = stat_text(busy()).splitlines()
    assert lines[1] == ("time to first token: saved 123,457 s, lost 89.1 s; net benefit 123,368 s")
    assert lines[2] == "  saved: measured 3,457 s, predicted 120,000 s"
    assert "cpu +" in lines[3]


def test_a_fresh_daemon_claims_nothing() -> None:
    lines = stat_text(document()).splitlines()
    assert lines[1] == (
        "time to first token: saved 0 ms, lost 0 ms; no engine has reported a restore yet"
    )
    assert "decided" not in "\n".join(lines)


def test_a_loss_is_called_one() -> None:
    lost = document()
    lost["worth"] |= {"saved_s": 1.0, "lost_s": 3.0}
    lost["worth"]["actual_s"]["restore"] = 4.0
    assert "net benefit -2 s" in stat_text(lost)


def test_names_of_clients_cannot_steer_a_terminal() -> None:
    evil = copy.deepcopy(busy())
    evil["policy"]["classes"][0]["kind"] = "\x1b[2Jred"
    assert "\x1b" not in stat_text(evil)


def test_a_tier_that_is_left_alone_is_named() -> None:
    assert "did not pay off: remote, ssd" in stat_text(busy())


def test_a_tier_that_could_not_be_measured_is_named_with_what_is_used_instead() -> None:
    full = document()
    full["cost"]["unmeasured"] = {"ssd": "it is full"}
    assert "ssd was not measured: it is full; using an estimate until the first read" in stat_text(
        full
    )
    full["cost"]["routes"] = {"ssd_to_cpu": next(iter(busy()["cost"]["routes"].values()))}
    assert "ssd was not measured: it is full; using earlier figures" in stat_text(full)


def test_files_of_another_version_are_counted_and_it_is_said_what_to_do() -> None:
    after = document()
    after["tiers"]["ssd"]["detail"] = {
        "segments": 3,
        "files_set_aside": 2,
        "set_aside_bytes": 1 << 29,
    }
    text = stat_text(after)
    assert max(map(len, text.splitlines())) <= 80
    told = " ".join(text.split())
    assert "ssd: 2 files of another version set aside, 512 MiB." in told
    assert "run `kvtier fsck --remove-set-aside`" in told
    assert "another version" not in stat_text(document())
