"""The front is computed while the back is loaded: whoever is faster or fails, no token changes."""

import pytest

from kvtier.core.plan import PlanReason, RestorePlan
from kvtier.core.residency import TierName
from kvtier.engine.model import LoadedModel
from kvtier.engine.port import PortLookup
from kvtier.engine.request import FinishReason
from kvtier.engine.split import SplitProgress
from kvtier.testing.memory_port import LoadScript, MemoryPort
from tests.engine.drive import Answer, Drive, prompt
from tests.engine.models import Reference

LENGTH = 620
NUM_BLOCKS = 9
"""Full blocks of 64 tokens before the last token, so that 44 tokens are always computed."""


def split_plan(found: PortLookup) -> RestorePlan | None:
    return (
        RestorePlan(7, len(found.tiers), PlanReason.SPLIT, is_split=True) if found.tiers else None
    )


def warm(tiny: LoadedModel, length: int = LENGTH, **settings: int) -> tuple[Drive, MemoryPort]:
    """An engine whose port keeps a prompt's blocks, says split, and waits to be told."""
    other = MemoryPort()
    Drive(tiny, other).ask(prompt(length), 1)
    port = MemoryPort(kept=other.kept, make_plan=split_plan, is_manual=True)
    return Drive(tiny, port, **settings), port


def begin(drive: Drive, port: MemoryPort, length: int = LENGTH, max_tokens: int = 8) -> Answer:
    """Submit the prompt and step until its load is open and its first claim is computed."""
    answer = drive.submit(prompt(length), max_tokens)
    drive.step()
    name = next(iter(port.open_lookups))
    port.finish_lookup(name)
    drive.step()
    assert port.loads[-1].from_back
    return answer


def computed(drive: Drive) -> int:
    return drive.engine.snapshot().num_prefill_tokens


def let_go(port: MemoryPort) -> None:
    """End what is open, and from now on everything at once."""
    port.is_manual = False
    port.finish_all()


def end_stores(port: MemoryPort) -> None:
    for store_id in list(port.open_stores):
        port.finish_store(store_id)


def test_both_ends_meet(tiny: LoadedModel, reference: Reference) -> None:
    drive, port = warm(tiny)
    answer = begin(drive, port)
    for num_loaded in range(1, NUM_BLOCKS):
        if "request-1" not in port.open_loads or not port.open_loads["request-1"].num_left:
            break
        port.report_loaded("request-1", num_loaded)
        drive.step()
    let_go(port)
    drive.run()
    usage = answer.usage
    assert answer.tokens == reference.generate(prompt(LENGTH), 8)
    assert usage.decision == "loaded_part:split"
    assert usage.tier_tokens[TierName.CPU] + usage.computed_tokens == LENGTH
    assert 3 * 64 <= usage.tier_tokens[TierName.CPU] <= 6 * 64, "each did about half"


@pytest.mark.parametrize("num_loaded", range(NUM_BLOCKS + 1))
@pytest.mark.parametrize("reason", ["failed", "late"])
def test_a_load_that_falls_short_leaves_the_rest_to_computing(
    tiny: LoadedModel, reference: Reference, num_loaded: int, reason: str
) -> None:
    drive, port = warm(tiny)
    answer = begin(drive, port)
    claimed = port.open_loads["request-1"].num_claimed
    assert claimed == 1, "the first claim is one block"
    port.finish_load("request-1", LoadScript(num_loaded, reason))
    let_go(port)
    drive.run()
    came = min(num_loaded, NUM_BLOCKS - claimed)
    assert answer.tokens == reference.generate(prompt(LENGTH), 8)
    assert answer.usage.tier_tokens[TierName.CPU] == 64 * came
    whole = came == NUM_BLOCKS - claimed
    expected = "loaded_part:split" if whole else f"{'loaded_part' if came else 'computed'}:{reason}"
    assert answer.usage.decision == expected
    assert drive.ask(prompt(LENGTH), 8).tokens == answer.tokens, "no garbage was published"


def test_a_load_that_is_quicker_than_a_step_brings_all(
    tiny: LoadedModel, reference: Reference
) -> None:
    drive, port = warm(tiny)
    port.is_manual = False
    port.meets_max = 0
    answer = drive.ask(prompt(LENGTH), 8)
    assert answer.tokens == reference.generate(prompt(LENGTH), 8)
    assert answer.usage.decision == "loaded"
    assert answer.usage.tier_tokens[TierName.CPU] == NUM_BLOCKS * 64


def test_a_load_that_hangs_holds_nothing_up(tiny: LoadedModel, reference: Reference) -> None:
    drive, port = warm(tiny)
    answer = begin(drive, port)
    port.report_loaded("request-1", 3)
    drive.settle()
    assert answer.is_done, "all that is left of the load was claimed and computed"
    assert answer.tokens == reference.generate(prompt(LENGTH), 8)
    assert answer.usage.tier_tokens[TierName.CPU] == 3 * 64
    assert answer.usage.decision == "loaded_part:split"
    assert "request-1" in port.open_loads
    held = drive.engine.snapshot().pool_blocks.used
    assert held >= NUM_BLOCKS * 4, "its blocks stay its own as long as it is open"
    port.finish_all()
    drive.run()
    assert drive.engine.snapshot().pool_blocks.used == 0


def test_a_load_that_brings_nothing_is_computed_past(
    tiny: LoadedModel, reference: Reference
) -> None:
    drive, port = warm(tiny)
    answer = begin(drive, port)
    drive.settle()
    assert answer.is_done
    assert answer.tokens == reference.generate(prompt(LENGTH), 8)
    assert answer.usage.computed_tokens == LENGTH
    assert answer.usage.decision == "computed:split"
    port.finish_all()
    drive.run()


def test_a_partial_plan_leaves_the_tail_to_computing(
    tiny: LoadedModel, reference: Reference
) -> None:
    drive, port = warm(tiny)
    port.make_plan = lambda _found: RestorePlan(7, 5, PlanReason.SPLIT, is_split=True)
    answer = begin(drive, port)
    port.finish_load("request-1")
    let_go(port)
    drive.run()
    assert answer.tokens == reference.generate(prompt(LENGTH), 8)
    assert answer.usage.tier_tokens[TierName.CPU] == 4 * 64
    assert port.loads[-1].decision == 7


@pytest.mark.parametrize("num_loaded", [0, 2, 8])
def test_abort_in_the_middle(tiny: LoadedModel, reference: Reference, num_loaded: int) -> None:
    drive, port = warm(tiny)
    answer = begin(drive, port)
    port.report_loaded("request-1", num_loaded)
    assert drive.engine.abort("request-1")
    drive.engine.check()
    assert answer.finish is FinishReason.ABORT
    assert port.cancelled == ["request-1"]
    assert port.finished["request-1"] is None, "nothing can be told of its plan"
    drive.step()
    end_stores(port)
    drive.step()
    assert drive.engine.snapshot().pool_blocks.used == NUM_BLOCKS * 4
    let_go(port)
    drive.run()
    assert drive.engine.snapshot().pool_blocks.used == 0
    assert drive.ask(prompt(LENGTH), 8).tokens == reference.generate(prompt(LENGTH), 8)


def preempted(tiny: LoadedModel, num_blocks: int = 3) -> tuple[Drive, MemoryPort, Answer, Answer]:
    """Two requests, of which the second has lost its blocks while its load goes on."""
    drive, port = warm(tiny, 200, pool_tokens=320)
    split = RestorePlan(7, num_blocks, PlanReason.SPLIT, is_split=True)
    port.make_plan = lambda found: split if found.tiers else None
    port.is_manual = False
    first = drive.submit(prompt(60, seed=1), 100)  # it grows until the pool is full
    drive.step()
    port.is_manual = True
    second = drive.submit(prompt(200), 8)
    drive.step()
    port.finish_lookup("request-2")
    drive.engine._scheduler.poll(0)
    drive.engine._scheduler.admit(0)
    port.copy_loaded(
        "request-2", num_blocks
    )  # it cannot be met any more, and is not there yet either
    while not drive.engine.snapshot().num_preemptions:
        assert drive.step()
        end_stores(port)
    return drive, port, first, second


def test_preempted_in_the_middle(tiny: LoadedModel, reference: Reference) -> None:
    drive, port, first, second = preempted(tiny)
    assert port.open_loads, "its load goes on, into blocks that are held for it"
    assert port.cancelled == ["request-2"]
    drive.step()
    assert len(port.loads) == 1, "it begins again once that has ended"
    let_go(port)
    drive.run()
    assert first.tokens == reference.generate(prompt(60, seed=1), 100)
    assert second.tokens == reference.generate(prompt(200), 8)
    assert port.finished["request-2"] is None, "what it took in all says nothing of the plan"


def test_preempted_it_waits_for_its_load_though_there_is_room(
    tiny: LoadedModel, reference: Reference
) -> None:
    drive, port, _, second = preempted(tiny, num_blocks=1)
    drive.engine.abort("request-1")
    end_stores(port)
    drive.step()
    assert port.open_loads
    assert not port.open_lookups, "two of one name could not be told apart"
    assert drive.engine.num_waiting == 1
    let_go(port)
    drive.run()
    assert second.tokens == reference.generate(prompt(200), 8)


def test_others_hit_the_front_as_it_is_computed(tiny: LoadedModel, reference: Reference) -> None:
    drive, port = warm(tiny)
    slow = begin(drive, port)
    drive.step()
    done = computed(drive)
    assert done >= 128
    other = drive.submit(prompt(LENGTH)[:100] + prompt(20, seed=5), 8, max_load_tokens=0)
    drive.step()
    assert drive.engine.snapshot().num_running == 2, "its own blocks are there"
    let_go(port)
    drive.run()
    expected = reference.generate(prompt(LENGTH)[:100] + prompt(20, seed=5), 8)
    assert other.tokens == expected
    assert other.usage.tier_tokens[TierName.GPU] == 96
    assert slow.tokens == reference.generate(prompt(LENGTH), 8)


def test_the_back_is_published_as_it_comes(tiny: LoadedModel) -> None:
    drive, port = warm(tiny)
    begin(drive, port)
    hashes = drive.engine._scheduler.sequences["request-1"].chain.hashes
    pool = drive.engine.pool
    assert pool.match(hashes[35:36], 1) == 0
    port.report_loaded("request-1", 1)
    drive.step()
    assert pool.match(hashes[32:36], 4) == 4
    assert pool.match(hashes[31:32], 1) == 0, "garbage is not"
    let_go(port)
    drive.run()


@pytest.mark.parametrize("num_engine_blocks", [1, 3, 5])
@pytest.mark.parametrize("num_loaded", [1, 6, 9])
def test_a_gpu_hit_that_ends_inside_a_block_below(
    tiny: LoadedModel, reference: Reference, num_engine_blocks: int, num_loaded: int
) -> None:
    drive, port = warm(tiny)
    port.is_manual = False
    num_hit = num_engine_blocks * 16
    drive.ask(prompt(LENGTH)[: num_hit + 1], 1, max_load_tokens=0)
    port.is_manual = True
    answer = drive.submit(prompt(LENGTH), 8)
    drive.step()
    port.finish_lookup("request-2")
    drive.engine._scheduler.poll(0)
    drive.engine._scheduler.admit(0)
    port.report_loaded("request-2", num_loaded)
    drive.step()
    drive.step()
    if "request-2" in port.open_loads:
        port.finish_load("request-2")
    let_go(port)
    drive.run()
    assert answer.tokens == reference.generate(prompt(LENGTH), 8)
    assert answer.usage.tier_tokens[TierName.GPU] == num_hit


def test_tokens_count_for_their_tier_from_either_end(
    tiny: LoadedModel, reference: Reference
) -> None:
    drive, port = warm(tiny)
    hashes = list(port.kept)
    port.tiers = {hashes[8]: TierName.SSD, hashes[7]: TierName.REMOTE, hashes[6]: TierName.SSD}
    answer = begin(drive, port)
    port.report_loaded("request-1", 4)
    drive.settle()
    tokens = answer.usage.tier_tokens
    assert tokens == {TierName.CPU: 64, TierName.SSD: 128, TierName.REMOTE: 64}
    assert answer.usage.computed_tokens == LENGTH - 256
    assert answer.tokens == reference.generate(prompt(LENGTH), 8)
    port.finish_all()
    drive.run()


def test_a_split_shares_its_steps_with_others(tiny: LoadedModel, reference: Reference) -> None:
    drive, port = warm(tiny, max_batch_tokens=64)
    other = drive.submit(prompt(40, seed=3), 30, max_load_tokens=0)
    drive.step()
    slow = begin(drive, port)
    drive.settle()
    assert other.is_done
    assert slow.is_done
    assert other.tokens == reference.generate(prompt(40, seed=3), 30)
    assert slow.tokens == reference.generate(prompt(LENGTH), 8)
    port.finish_all()
    drive.run()


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 1.0, 2.0, 10.0, 100.0])
@pytest.mark.parametrize("num_blocks", [1, 2, 10, 100, 1000])
def test_no_end_waits_long_for_the_other(num_blocks: int, rate: float) -> None:
    """Loading ``rate`` blocks in the time of computing one, how far are we from the best?"""
    split, time = SplitProgress(num_blocks), 0.0
    while split.gap:
        claim = split.next_claim() - split.num_claimed
        assert 1 <= claim <= split.gap
        split.num_claimed += claim
        time += claim
        most = num_blocks - split.num_claimed
        split.num_loaded = min(most, int(time * rate))
    assert split.next_claim() == split.num_claimed, "there is nothing left to claim"
    best = num_blocks / (1 + rate)
    assert time <= 1.1 * best + 2, f"{time} blocks of computing, and {best} would have done"
