"""What decides, put together as it is configured: no limit follows from a guess."""

import pytest

from kvtier.config import load_config
from kvtier.core.plan import StepSample, TransferSample
from kvtier.core.request import RequestTraits
from kvtier.core.residency import TierName
from kvtier.core.reuse.history import Use
from kvtier.daemon.policies import policies

MIB = 1 << 20
SECOND = 1_000_000_000
KEY_SPACE = b"k" * 16


def use(block_bytes: int) -> Use:
    keys = [bytes([place]) * 16 for place in range(64)]
    return Use(keys, block_bytes, 64, bytes(16), RequestTraits())


def limit_of(made, block_bytes: int, num_reused: int = 2) -> int | None:
    """Return how deep it pays to keep prompts of which so many blocks come back, now and then."""
    for number in range(2000):
        made.depth.note(use(block_bytes), num_reused * (number % 10 == 0), number * 5 * SECOND)
    return made.depth.max_offload_tokens(use(block_bytes))


@pytest.mark.parametrize("block_bytes", [4096, 3 * MIB, 64 * MIB, 1 << 30])
@pytest.mark.parametrize("is_engine_fast", [None, False, True])
def test_while_nobody_measured_the_cpu_tier_whatever_comes_back_is_kept(
    block_bytes, is_engine_fast
):
    made = policies(load_config(None, {}, {}))
    if is_engine_fast is not None:
        seconds = 1e-4 if is_engine_fast else 10.0
        steps = [StepSample(512, 0, 512 * 256.0, 0, seconds)] * 16
        made.planner.note_steps(KEY_SPACE, steps, 0)
    assert limit_of(made, block_bytes) == 256, "where the reuse ends, and no sooner"


def test_once_it_was_measured_a_slow_one_is_not_worth_storing_to():
    made = policies(load_config(None, {}, {}))
    steps = [StepSample(512, 0, 512 * 256.0, 0, 1e-3)] * 16
    made.planner.note_steps(KEY_SPACE, steps, 0)
    for count in (1, 4, 8, 2) * 8:
        sample = TransferSample(count, count * 3 * MIB, 1, count * 0.1)
        made.planner.note_transfer(TierName.CPU, True, sample, 0)
    assert limit_of(made, 3 * MIB) == 0
