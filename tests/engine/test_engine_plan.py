"""What the engine is told it does, and what it tells: plans, announcements, outcomes, steps."""

import itertools
from typing import Any

import pytest

from kvtier.core.plan import EngineLoad, PlanReason, RestorePlan
from kvtier.core.residency import TierName
from kvtier.engine.engine import Engine
from kvtier.engine.model import LoadedModel, model_flops
from kvtier.engine.request import Hints
from kvtier.engine.sequence import RequestTiming, TokenSources
from kvtier.testing.memory_port import MemoryPort
from tests.engine.drive import Drive, prompt
from tests.engine.models import Reference

SECOND = 1_000_000_000


def planned(tiny: LoadedModel, plan: RestorePlan | None, **fields: Any) -> tuple[Drive, MemoryPort]:
    """An engine whose tiers hold four blocks of a prompt, and have this plan for them."""
    other = MemoryPort()
    Drive(tiny, other).ask(prompt(300), 1)
    port = MemoryPort(kept=other.kept, make_plan=lambda _found: plan, **fields)
    return Drive(tiny, port), port


# Following


@pytest.mark.parametrize(
    ("reason", "num_blocks", "decision"),
    [
        (PlanReason.ALL, 4, "loaded"),
        (PlanReason.ALWAYS, 4, "loaded"),
        (PlanReason.PART, 3, "loaded_part:part"),
        (PlanReason.COST, 0, "computed:cost"),
        (PlanReason.RISK, 0, "computed:risk"),
        (PlanReason.GUARD, 0, "computed:guard"),
        (PlanReason.GUARD, 1, "loaded_part:guard"),
        (PlanReason.NEVER, 0, "computed:never"),
        (PlanReason.LIMIT, 2, "loaded_part:max_load_tokens"),
    ],
)
def test_no_more_is_loaded_than_planned(
    tiny: LoadedModel, reference: Reference, reason: PlanReason, num_blocks: int, decision: str
) -> None:
    drive, port = planned(tiny, RestorePlan(9, num_blocks, reason, wait_ns=5 * SECOND))
    answer = drive.ask(prompt(300), 8)
    assert answer.tokens == reference.generate(prompt(300), 8)
    assert answer.usage.decision == decision
    assert answer.usage.tier_tokens[TierName.CPU] == num_blocks * 64
    assert [(order.decision, order.wait_ns) for order in port.loads] == (
        [(9, 5 * SECOND)] if num_blocks else []
    )


def test_the_requests_own_limit_goes_before_the_plan(tiny: LoadedModel) -> None:
    drive, port = planned(tiny, RestorePlan(9, 4, PlanReason.ALL))
    answer = drive.ask(prompt(300), 1, max_load_tokens=130)
    assert answer.usage.tier_tokens[TierName.CPU] == 128
    assert answer.usage.decision == "loaded_part:max_load_tokens"
    assert port.announced["request-1"][2].max_load_tokens == 130


@pytest.mark.parametrize(
    ("own", "advised", "num_blocks"),
    [(None, None, 4), (None, 130, 2), (None, 0, 0), (200, 64, 3), (0, 256, 0), (64, None, 1)],
)
def test_how_deep_to_offer(
    tiny: LoadedModel, own: int | None, advised: int | None, num_blocks: int
) -> None:
    port = MemoryPort(max_offload_tokens=advised)
    Drive(tiny, port).ask(prompt(300), 1, max_offload_tokens=own)
    assert len(port.kept) == num_blocks


# Telling


def test_each_request_is_announced_with_what_is_known_of_it(tiny: LoadedModel) -> None:
    port = MemoryPort()
    drive = Drive(tiny, port)
    hints = Hints(kind="agent", continues=0.5, gap_s=3.0, priority=2, ttl_s=60.0)
    drive.ask(prompt(320), 1, hints=hints, max_offload_tokens=2**40)
    chain, first, traits = port.announced["request-1"]
    assert len(chain.hashes) == 5, "all full blocks, also the last token's"
    assert first == 5, "alone it has its turn now: there is nothing to fetch beforehand"
    assert (traits.num_tokens, traits.kind, traits.continues) == (320, "agent", 0.5)
    assert (traits.gap_s, traits.priority, traits.ttl_s) == (3.0, 2, 60.0)
    assert traits.max_offload_tokens == 2**31 - 1, "it fits a message"
    drive.ask(prompt(320), 1)
    assert port.announced["request-2"][1] == 5, "those that the GPU answers too"
    drive.ask(prompt(63), 1)
    assert "request-3" not in port.announced, "it fills no block"
    assert list(port.finished) == ["request-1", "request-2", "request-3"]


def test_what_is_offered_says_what_was_generated(tiny: LoadedModel) -> None:
    port = MemoryPort()
    drive = Drive(tiny, port)
    drive.ask(prompt(150), 60, hints=Hints(kind="chat"))
    assert {offer.num_prompt_blocks for offer in port.offers} == {2}
    assert {offer.traits.kind for offer in port.offers} == {"chat"}


def test_a_request_is_done_with_at_its_first_token(tiny: LoadedModel) -> None:
    port = MemoryPort()
    drive = Drive(tiny, port)
    answer = drive.submit(prompt(100), 50)
    while not answer.outputs:
        assert not port.finished
        drive.step()
    assert list(port.finished) == ["request-1"]
    drive.engine.abort("request-1")
    assert list(port.finished) == ["request-1"]


class Ticking:
    """Each look at it takes half a second, as each step does that looks twice."""

    def __init__(self) -> None:
        self._times = itertools.count(step=SECOND // 2)

    def __call__(self) -> int:
        return next(self._times)


def test_the_outcome_is_what_it_took(tiny: LoadedModel) -> None:
    drive, port = planned(tiny, RestorePlan(9, 3, PlanReason.PART), is_manual=True)
    drive.engine = Engine(
        tiny, drive.engine.settings, port, pool=drive.engine.pool, clock_ns=Ticking()
    )
    port.tiers = {list(port.kept)[1]: TierName.SSD}
    drive.now_ns = 10 * SECOND
    drive.submit(prompt(300), 1)
    drive.now_ns = 12 * SECOND
    drive.step()  # it waited for two seconds, and is looked up
    port.finish_lookup("request-1")
    drive.now_ns = 13 * SECOND
    drive.step()  # its load begins
    port.finish_load("request-1")
    drive.now_ns = 17 * SECOND
    drive.step()  # the load has ended, and the rest is computed in half a second
    outcome = port.finished["request-1"]
    assert outcome is not None
    assert outcome.decision == 9
    assert dict(outcome.tiers) == {TierName.CPU: 2, TierName.SSD: 1}
    assert outcome.restore_s == 4.0
    assert outcome.computed_tokens == 300 - 192
    assert outcome.compute_s == 0.5
    assert outcome.wait_s == 2.0
    assert outcome.ttft_s == 7.5
    port.finish_all()
    drive.run()


def test_a_step_is_shared_by_its_tokens(tiny: LoadedModel) -> None:
    drive, port = planned(tiny, RestorePlan(9, 0, PlanReason.COST))
    drive.engine = Engine(
        tiny, drive.engine.settings, port, pool=drive.engine.pool, clock_ns=Ticking()
    )
    drive.submit(prompt(300), 1)
    drive.submit(prompt(100, seed=1), 1, max_load_tokens=0)
    drive.run()
    outcome = port.finished["request-1"]
    assert outcome is not None
    assert outcome.tiers == ()
    assert outcome.compute_s == pytest.approx(0.5)  # the other went on while this one was asked for


def test_steps_say_what_was_attended(tiny: LoadedModel) -> None:
    port = MemoryPort()
    drive = Drive(tiny, port, max_batch_tokens=100)
    drive.ask(prompt(150), 3)
    first, second, *decoding = port.steps
    assert (first.num_prefill_tokens, first.attended) == (100, 100 * 50)
    assert (second.num_prefill_tokens, second.attended) == (50, 50 * (100 + 25))
    assert [(step.num_decode_tokens, step.decode_past_tokens) for step in decoding] == [
        (1, 150),
        (1, 151),
    ]
    assert all(step.seconds > 0 for step in port.steps)


def test_a_lookup_says_what_is_before_it(tiny: LoadedModel) -> None:
    port = MemoryPort()
    drive = Drive(tiny, port, max_batch_tokens=64, max_num_sequences=2)
    drive.submit(prompt(40, seed=9), 50)
    drive.step()
    for seed in range(1, 4):
        drive.submit(prompt(100, seed=seed), 1)
    drive.step()
    assert port.waiting["request-2"] == EngineLoad(waiting_tokens=0, num_running=1)
    while "request-4" not in port.waiting:
        drive.step()
    assert port.waiting["request-4"].num_running == 1
    assert drive.engine._scheduler.load_before().waiting_tokens >= 100


# Flocks


@pytest.mark.parametrize("is_warm", [False, True])
def test_fifty_requests_share_a_prefix_and_nobody_waits_for_anothers_tail(
    tiny: LoadedModel, reference: Reference, is_warm: bool
) -> None:
    stem, tail = prompt(128, seed=8), prompt(500, seed=9)
    port = MemoryPort()
    if is_warm:
        Drive(tiny, port).ask(stem + prompt(1), 1)
    drive = Drive(tiny, MemoryPort(kept=port.kept), pool_tokens=8192, max_batch_tokens=128)
    owner = drive.submit(stem + tail, 1)
    others = [drive.submit(stem + prompt(9, seed=seed), 1) for seed in range(49)]
    num_steps = 0
    while drive.engine.snapshot().num_running < 50:
        drive.step()
        num_steps += 1
        assert not owner.outputs, "its tail is long"
    assert num_steps <= 5, "all go on as soon as the stem is there"
    drive.run()
    assert owner.tokens == reference.generate(stem + tail, 1)
    for seed, other in enumerate(others):
        assert other.usage.tier_tokens[TierName.GPU] == 128
        assert other.tokens == reference.generate(stem + prompt(9, seed=seed), 1)


# Parts


def test_each_token_counts_once() -> None:
    sources = TokenSources(100)
    sources.count(TierName.GPU, 0, 16)
    sources.count(TierName.SSD, 64, 96)
    sources.count(None, 0, 70)
    sources.count(None, 60, 500)
    sources.count(TierName.CPU, 0, 100)
    assert sources.by_tier == {TierName.GPU: 16, TierName.SSD: 32}
    assert sources.computed == 52
    assert sources.num_counted == 100
    assert sources.is_counted(1000)
    assert not TokenSources(1).is_counted(1)


def test_a_spoilt_request_has_no_outcome() -> None:
    timing = RequestTiming(0, 0)
    assert timing.outcome(3, 10, SECOND) is not None
    assert timing.outcome(0, 10, SECOND) is None
    timing.was_preempted = True
    assert timing.outcome(3, 10, SECOND) is None


def test_the_first_guess_has_the_right_order(tiny: LoadedModel) -> None:
    flops = model_flops(tiny)
    attention = 2 * (48 * 48 + 48 * 16)
    assert flops.per_token == 2 * 3 * (attention + 3 * 48 * 96)
    assert flops.per_attended == 4 * 3 * 6 * 8
    assert 1e8 < flops.per_s < 1e15
