"""What comes back from below changes no token: whole, in part, late, failing, garbage."""

import pytest

from kvtier.core.residency import TierName
from kvtier.engine.model import LoadedModel
from kvtier.engine.request import FinishReason
from kvtier.testing.memory_port import LoadScript, MemoryPort
from tests.engine.drive import Answer, Drive, prompt
from tests.engine.models import Reference


def _warm(tiny: LoadedModel, length: int = 300, **settings: int) -> tuple[Drive, MemoryPort]:
    """An engine whose port keeps a prompt's blocks and whose pool has forgotten them."""
    port = MemoryPort()
    drive = Drive(tiny, port, **settings)
    drive.ask(prompt(length), 1)
    drive.engine.drop_cache()
    return drive, port


def _same(answer: Answer, reference: Reference, length: int = 300) -> bool:
    return answer.tokens == reference.generate(prompt(length), 8)


@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129, 300])
def test_loaded_whole(tiny: LoadedModel, reference: Reference, length: int) -> None:
    drive, _ = _warm(tiny, length)
    answer = drive.ask(prompt(length), 8)
    assert _same(answer, reference, length)
    loaded = (length - 1) // 64 * 64
    assert answer.usage.tier_tokens[TierName.CPU] == loaded
    assert answer.usage.computed_tokens == length - loaded
    assert answer.usage.decision == ("loaded" if loaded else "computed:too_short")


@pytest.mark.parametrize("num_blocks", [0, 1, 2, 3])
@pytest.mark.parametrize("is_reported_early", [False, True])
def test_load_that_fails_half_way(
    tiny: LoadedModel, reference: Reference, num_blocks: int, is_reported_early: bool
) -> None:
    drive, port = _warm(tiny)
    port.script = LoadScript(num_blocks, "failed", is_reported_early)
    answer = drive.ask(prompt(300), 8)
    assert _same(answer, reference)
    assert answer.usage.tier_tokens[TierName.CPU] == 64 * num_blocks
    assert answer.usage.decision == ("loaded_part:failed" if num_blocks else "computed:failed")
    again = drive.ask(prompt(300), 8)  # the garbage was not published
    assert _same(again, reference)
    assert again.usage.decision == "gpu_hit"


def test_found_only_in_part(tiny: LoadedModel, reference: Reference) -> None:
    drive, port = _warm(tiny)
    del port.kept[list(port.kept)[2]]
    answer = drive.ask(prompt(300), 8)
    assert _same(answer, reference)
    assert answer.usage.tier_tokens[TierName.CPU] == 128
    assert answer.usage.decision == "loaded_part:absent"


def test_absent(tiny: LoadedModel, reference: Reference) -> None:
    drive = Drive(tiny, MemoryPort())
    answer = drive.ask(prompt(300), 8)
    assert _same(answer, reference)
    assert answer.usage.decision == "computed:absent"


def test_tokens_count_for_the_tier_that_served_them(
    tiny: LoadedModel, reference: Reference
) -> None:
    drive, port = _warm(tiny)
    hashes = list(port.kept)
    port.tiers = {hashes[1]: TierName.SSD, hashes[2]: TierName.REMOTE, hashes[3]: TierName.SSD}
    answer = drive.ask(prompt(300), 8)
    assert _same(answer, reference)
    tokens = answer.usage.tier_tokens
    assert tokens == {TierName.CPU: 64, TierName.SSD: 128, TierName.REMOTE: 64}


@pytest.mark.parametrize("num_engine_blocks", [1, 3, 4, 5, 7, 11])
def test_gpu_hit_that_ends_inside_a_block_below(
    tiny: LoadedModel, reference: Reference, num_engine_blocks: int
) -> None:
    drive, _ = _warm(tiny)
    num_hit = num_engine_blocks * 16
    drive.ask(prompt(300)[: num_hit + 1], 1, max_load_tokens=0)
    holder = drive.submit(prompt(300)[: num_hit + 1], 60, max_load_tokens=0)
    drive.step()  # it reads the shared blocks while the other's load writes
    answer = drive.submit(prompt(300), 8)
    drive.run()
    assert _same(answer, reference)
    assert holder.tokens == reference.generate(prompt(300)[: num_hit + 1], 60)
    assert answer.usage.tier_tokens[TierName.GPU] == num_hit
    assert answer.usage.tier_tokens[TierName.CPU] == 256 - num_hit


@pytest.mark.parametrize(
    ("max_load_tokens", "loaded", "decision"),
    [
        (0, 0, "computed:max_load_tokens"),
        (63, 0, "computed:max_load_tokens"),
        (64, 64, "loaded_part:max_load_tokens"),
        (191, 128, "loaded_part:max_load_tokens"),
        (256, 256, "loaded"),
        (10_000, 256, "loaded"),
    ],
)
def test_max_load_tokens(
    tiny: LoadedModel, reference: Reference, max_load_tokens: int, loaded: int, decision: str
) -> None:
    drive, port = _warm(tiny)
    port.num_lookups = 0
    answer = drive.ask(prompt(300), 8, max_load_tokens=max_load_tokens)
    assert _same(answer, reference)
    assert answer.usage.tier_tokens[TierName.CPU] == loaded
    assert answer.usage.decision == decision
    assert port.num_lookups == (0 if max_load_tokens < 64 else 1)


@pytest.mark.parametrize(("limit", "num_blocks"), [(0, 0), (63, 0), (64, 1), (200, 3), (None, 5)])
def test_max_offload_tokens(tiny: LoadedModel, limit: int | None, num_blocks: int) -> None:
    port = MemoryPort()
    drive = Drive(tiny, port)
    drive.ask(prompt(300), 30, max_offload_tokens=limit)
    assert len(port.kept) == num_blocks


def test_every_block_is_offered_once(tiny: LoadedModel, reference: Reference) -> None:
    port = MemoryPort()
    drive = Drive(tiny, port, max_batch_tokens=100)
    for _ in range(3):
        drive.ask(prompt(300), 90)
    num_tokens = 300 + len(reference.generate(prompt(300), 90)) - 1
    assert len(port.stored_hashes) == len(set(port.stored_hashes)) == num_tokens // 64


def test_generated_blocks_come_back(tiny: LoadedModel, reference: Reference) -> None:
    drive = Drive(tiny, MemoryPort())
    first = drive.ask(prompt(60), 80)
    drive.engine.drop_cache()
    longer = prompt(60) + tuple(first.tokens) + prompt(5, seed=1)
    answer = drive.ask(longer, 8)
    assert answer.usage.tier_tokens[TierName.CPU] == (len(longer) - 5 - 1) // 64 * 64 > 0
    assert answer.tokens == reference.generate(longer, 8)


def test_a_block_that_was_not_taken_is_offered_again(tiny: LoadedModel) -> None:
    port = MemoryPort(stores_taken_max=1)
    drive = Drive(tiny, port)
    drive.ask(prompt(300), 1)
    assert len(port.kept) == 1
    port.stores_taken_max = None
    drive.ask(prompt(300), 1)
    assert len(port.kept) == 4


def test_open_stores_keep_their_blocks(tiny: LoadedModel, reference: Reference) -> None:
    port = MemoryPort(is_manual=True)
    drive = Drive(tiny, port, pool_tokens=400)
    first = drive.submit(prompt(129), 1)
    drive.settle()
    port.finish_lookup("request-1")
    drive.settle()
    assert first.is_done
    assert port.open_stores
    held = drive.engine.snapshot().pool_blocks.used
    assert held == 8
    for seed in range(1, 4):  # fill the pool over and over
        drive.submit(prompt(200, seed=seed), 1, max_load_tokens=0, max_offload_tokens=0)
        drive.settle()
    assert drive.engine.snapshot().pool_blocks.used == 8
    port.finish_all()
    drive.run()
    drive.engine.drop_cache()
    port.is_manual = False
    answer = drive.ask(prompt(129), 8)
    assert answer.tokens == reference.generate(prompt(129), 8)
    assert answer.usage.tier_tokens[TierName.CPU] == 128


def test_a_store_too_many_is_skipped_and_offered_later(tiny: LoadedModel) -> None:
    port = MemoryPort(is_manual=True)
    drive = Drive(tiny, port, pool_tokens=512)
    drive.submit(prompt(300), 1, max_load_tokens=0)
    drive.settle()
    assert drive.engine.snapshot().num_stores_skipped == 0
    drive.submit(prompt(150, seed=1), 1, max_load_tokens=0)
    drive.settle()
    assert drive.engine.snapshot().num_stores_skipped == 2
    port.finish_all()
    drive.run()
    port.is_manual = False
    drive.ask(prompt(150, seed=1), 1)
    assert len(port.kept) == 6


def test_loading_overlaps_with_computing(tiny: LoadedModel, reference: Reference) -> None:
    drive, port = _warm(tiny)
    port.is_manual = True
    slow = drive.submit(prompt(300), 8)
    drive.settle()
    port.finish_lookup("request-2")
    drive.settle()
    other = drive.submit(prompt(40, seed=9), 8)
    drive.settle()
    assert other.is_done
    assert not slow.outputs
    assert drive.engine.snapshot().num_loading == 1
    port.finish_all()
    port.is_manual = False
    drive.run()
    assert _same(slow, reference)


@pytest.mark.parametrize("is_load_begun", [False, True])
def test_abort_while_the_port_works(
    tiny: LoadedModel, reference: Reference, is_load_begun: bool
) -> None:
    drive, port = _warm(tiny)
    port.is_manual = True
    answer = drive.submit(prompt(300), 8)
    drive.settle()
    if is_load_begun:
        port.finish_lookup("request-2")
        drive.settle()
        port.report_loaded("request-2", 1)
        drive.settle()
    assert drive.engine.abort("request-2")
    drive.engine.check()
    assert answer.finish is FinishReason.ABORT
    assert port.cancelled == ["request-2"]
    # Only what the load still writes to is held, and a fifth block group is free again.
    assert drive.engine.snapshot().pool_blocks.used == (16 if is_load_begun else 0)
    assert not drive.engine.is_idle
    port.finish_all()
    port.is_manual = False
    drive.run()
    assert drive.engine.snapshot().pool_blocks.used == 0
    assert _same(drive.ask(prompt(300), 8), reference)


def test_another_salt_never_hits(tiny: LoadedModel, reference: Reference) -> None:
    drive, _ = _warm(tiny)
    other = drive.ask(prompt(300), 8, cache_salt="another tenant")
    assert other.usage.tier_tokens.total() == 0
    assert _same(other, reference)
    drive.engine.drop_cache()
    assert drive.ask(prompt(300), 8).usage.tier_tokens[TierName.CPU] == 256


def test_two_engines_share_blocks(tiny: LoadedModel, reference: Reference) -> None:
    port = MemoryPort()
    Drive(tiny, port).ask(prompt(300), 1)
    second = MemoryPort(kept=port.kept, tier=TierName.REMOTE)
    answer = Drive(tiny, second).ask(prompt(300), 8)
    assert _same(answer, reference)
    assert answer.usage.tier_tokens[TierName.REMOTE] == 256


def test_load_without_room_for_spare_blocks_is_computed(
    tiny: LoadedModel, reference: Reference
) -> None:
    _, warm = _warm(tiny, 200)
    drive = Drive(tiny, MemoryPort(kept=warm.kept), pool_tokens=208)
    drive.ask(prompt(200)[:49], 1, max_load_tokens=0)
    answer = drive.ask(prompt(200), 8)
    assert _same(answer, reference, 200)
    assert answer.usage.decision == "computed:pool_full"


def test_preempted_requests_may_load_what_they_lost(
    tiny: LoadedModel, reference: Reference
) -> None:
    drive = Drive(tiny, MemoryPort(), pool_tokens=320)
    answers = [(seed, drive.submit(prompt(130, seed=seed), 40)) for seed in range(4)]
    drive.run()
    for seed, answer in answers:
        assert answer.tokens == reference.generate(prompt(130, seed=seed), 40)
        assert answer.usage.prompt_tokens == 130
    assert drive.engine.snapshot().num_preemptions > 0
