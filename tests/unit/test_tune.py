"""Open tiers, gates and the node go by other limits at once."""

from pathlib import Path

from kvtier.config import load_config
from kvtier.core.residency import TierName
from kvtier.daemon.policies import policies
from kvtier.daemon.tiers.opening import configured, open_tier, tune_tier
from kvtier.tiers.ssd.store_limits import DAY_S, WriteBudget


class Bucket:
    """A budget with a clock and a counter of what was written."""

    def __init__(self, day_bytes: int) -> None:
        self.now_s = 10**9
        self.written_bytes = 0
        self.budget = WriteBudget(day_bytes, lambda: self.written_bytes, lambda: self.now_s)


def test_another_budget_gives_or_takes_the_difference() -> None:
    bucket = Bucket(DAY_S * 10)
    bucket.written_bytes += DAY_S * 4
    bucket.budget.change(DAY_S * 20)
    assert bucket.budget.available_bytes() == DAY_S * 16
    bucket.now_s += 1
    assert bucket.budget.available_bytes() == DAY_S * 16 + 20
    bucket.budget.change(DAY_S * 3)
    assert bucket.budget.available_bytes() == 0, "more than that was written today"
    bucket.now_s += DAY_S // 2
    assert 0 < bucket.budget.available_bytes() < DAY_S * 3


def test_what_was_gained_by_then_is_gained_by_the_old_one() -> None:
    bucket = Bucket(DAY_S * 10)
    bucket.written_bytes += DAY_S * 10
    bucket.now_s += 100
    bucket.budget.change(DAY_S * 11)
    assert bucket.budget.available_bytes() == 1000 + DAY_S


def test_no_budget_and_one_again() -> None:
    bucket = Bucket(DAY_S)
    bucket.written_bytes += DAY_S
    bucket.budget.change(0)
    assert bucket.budget.allows(10**12)
    bucket.budget.change(DAY_S)
    assert bucket.budget.allows(1)
    assert not bucket.budget.allows(DAY_S + 1)


def test_tiers_that_are_open_take_their_limits_anew(tmp_path: Path) -> None:
    given = {
        "ssd.directory": str(tmp_path),
        "ssd.capacity": "8MiB",
        "ssd.segment": "1MiB",
        "ssd.free_space_floor": "0",
        "remote.url": "redis://127.0.0.1:1",
    }
    config = load_config(None, given, {})
    tiers = {name: open_tier(config, name, None) for name in configured(config)}
    try:
        limits = {"ssd.write_budget": "1GiB", "ssd.free_space_floor": "1000000TiB"}
        config = load_config(None, given | limits, {})
        for tier in tiers.values():
            tune_tier(config, tier)
        detail = tiers[TierName.SSD].usage().detail
        assert detail["write_budget_bytes"] == 1 << 30
    finally:
        for tier in tiers.values():
            tier.close()


def test_gates_and_depth_keep_what_they_learned() -> None:
    decide = policies(load_config(None, {}, {}))
    gate = decide.admission.gates[TierName.SSD]
    for number in range(100):
        gate.take(number / 100, number.to_bytes(16), num_bytes=1, now_ns=number)
    before = gate.threshold
    assert before > 0
    limits = {"ssd.gate": "0.25", "policy.max_offload_tokens": "128"}
    decide.adopt(load_config(None, limits, {}))
    assert (gate.share, gate.threshold) == (0.25, before)
    assert decide.depth.most_tokens == 128
