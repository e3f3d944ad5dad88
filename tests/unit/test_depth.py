"""How deep it pays to keep prompts is learned by class, from what came back."""

import random

import pytest

from kvtier.core.request import RequestTraits
from kvtier.core.reuse.depth import DepthCurves
from kvtier.core.reuse.history import Use

TOKENS = 64
MINUTE = 60_000_000_000
HOUR = 60 * MINUTE


def use(num_blocks=100, *, tenant=bytes(16), num_prompt_blocks=-1, **traits):
    keys = [bytes([place % 256, place // 256]) * 8 for place in range(num_blocks)]
    return Use(keys, 4096, TOKENS, tenant, RequestTraits(**traits), num_prompt_blocks)


def curves(most_tokens=None, saved_s=1.0, cost_s=0.1):
    return DepthCurves(lambda _end_tokens, _use: (saved_s, cost_s), most_tokens)


def live(depth, request, num_reused, *, hours=2.0, each_s=10, start_ns=0):
    """Let requests of one sort come, each with so many blocks that are known."""
    now_ns = start_ns
    while now_ns < start_ns + hours * HOUR:
        depth.note(request, num_reused, now_ns)
        now_ns += each_s * 1_000_000_000
    return now_ns


def test_nothing_is_cut_without_evidence():
    depth = curves()
    assert depth.max_offload_tokens(use()) is None
    live(depth, use(), 10, hours=0.2)  # younger than what could have come back by now
    assert depth.max_offload_tokens(use()) is None
    assert depth.max_offload_tokens(use(kind="other")) is None


def test_a_shared_head_is_kept_and_tails_that_never_come_back_are_not():
    depth = curves()
    live(depth, use(100), 16)
    assert depth.max_offload_tokens(use(100)) == 1024


def test_the_limit_is_where_reuse_no_longer_pays():
    depth = curves()
    seed = 11
    print(f"seed {seed}")
    draw = random.Random(seed)
    for number in range(3000):
        # A third begins anew, a third brings back 1,024 tokens, a third all of 2,048.
        depth.note(use(128), draw.choice((0, 16, 32)), number * 5_000_000_000)
    assert depth.max_offload_tokens(use(128)) == 2048


def test_what_pays_all_the_way_is_not_bounded():
    depth = curves()
    draw = random.Random(12)
    for number in range(3000):
        depth.note(use(64), draw.choice((0, 32, 64)), number * 5_000_000_000)
    assert depth.max_offload_tokens(use(64)) is None


def test_one_off_prompts_are_not_worth_their_first_block_and_open_again_once_they_return():
    depth = curves()
    now_ns = live(depth, use(kind="batch"), 0)
    assert depth.max_offload_tokens(use(kind="batch")) == 0
    live(depth, use(kind="batch"), 100, start_ns=now_ns)
    assert depth.max_offload_tokens(use(kind="batch")) is None


def test_classes_do_not_disturb_each_other():
    depth = curves()
    live(depth, use(kind="batch"), 0)
    for number in range(2000):
        depth.note(use(kind="chat"), 100 * (number % 2), number * 5_000_000_000)
    live(depth, use(continues=0.0), 0)
    assert depth.max_offload_tokens(use(kind="batch")) == 0
    assert depth.max_offload_tokens(use(kind="chat")) is None
    assert depth.max_offload_tokens(use(continues=0.1)) == 0
    assert depth.max_offload_tokens(use(continues=0.9)) is None


def test_a_tenant_is_told_apart_once_it_has_enough_requests():
    depth = curves()
    busy, rare = b"b" * 16, b"r" * 16
    for number in range(1500):
        depth.note(use(tenant=busy), 0, number * 5_000_000_000)
        depth.note(use(tenant=number.to_bytes(16)), 100, number * 5_000_000_000)
    assert depth.max_offload_tokens(use(tenant=busy)) == 0
    assert depth.max_offload_tokens(use(tenant=rare)) is None


def test_generated_blocks_count_as_stored():
    depth = curves()
    for number in range(1000):
        now_ns = number * 5_000_000_000
        depth.note(use(32), 32, now_ns)
        depth.note_generated(use(48, num_prompt_blocks=32), 32, now_ns)
        depth.note_generated(use(64, num_prompt_blocks=32), 48, now_ns)
    assert depth.max_offload_tokens(use(64)) == 2048


@pytest.mark.parametrize(
    ("configured", "wished", "limit"),
    [
        (None, 100, 64),
        (None, 0, 0),
        (None, 63, 0),
        (1000, None, 960),
        (0, None, 0),
        (1000, 64, 64),
        (0, 128, 128),
        (None, 2**31 - 1, (2**31 - 1) // TOKENS * TOKENS),
    ],
)
def test_what_is_said_overrides_what_was_learned_rounded_down_to_blocks(configured, wished, limit):
    depth = curves(configured)
    live(depth, use(kind="batch"), 0)
    assert depth.max_offload_tokens(use(kind="batch", max_offload_tokens=wished)) == limit


@pytest.mark.parametrize(
    ("configured", "wished", "limit"),
    [(None, None, 192), (1000, None, 192), (100, None, 64), (100, 500, 192), (None, 70, 64)],
)
def test_where_answers_are_not_kept_no_limit_goes_beyond_the_prompt(configured, wished, limit):
    depth = DepthCurves(lambda _end_tokens, _use: (1.0, 0.1), configured, is_prompt_alone=True)
    assert depth.max_offload_tokens(use(8, num_prompt_blocks=3, max_offload_tokens=wished)) == limit


def test_where_answers_are_not_kept_an_engine_that_does_not_tell_them_apart_keeps_all():
    depth = DepthCurves(lambda _end_tokens, _use: (1.0, 0.1), is_prompt_alone=True)
    assert depth.max_offload_tokens(use(8)) is None


def test_the_number_of_classes_is_bounded():
    depth = curves()
    for number in range(1000):
        depth.note(use(kind=f"kind {number}", tenant=number.to_bytes(16)), 3, number)
    assert len(depth.classes()) <= 64


def test_what_is_shown():
    depth = curves()
    live(depth, use(8, kind="batch"), 0)
    depth.max_offload_tokens(use(8, kind="batch"))
    (shown,) = depth.classes()
    assert shown["kind"] == "batch"
    assert shown["max_offload_tokens"] == 0
    (near, far) = shown["depths"]
    assert (near["from_tokens"], far["from_tokens"]) == (0, 256)
    assert near["stored_blocks"] > 1000
    assert near["reused_blocks"] == 0


def test_a_clock_that_is_set_back_does_no_harm():
    depth = curves()
    now_ns = live(depth, use(), 0)
    depth.note(use(), 0, 0)
    depth.note(use(), 100, now_ns)
    assert depth.max_offload_tokens(use()) == 0


def test_free_stores_are_never_cut():
    depth = curves(cost_s=0.0)
    for number in range(3000):
        depth.note(use(), 100 * (number % 100 == 0), number * 5_000_000_000)
    assert depth.max_offload_tokens(use()) is None
