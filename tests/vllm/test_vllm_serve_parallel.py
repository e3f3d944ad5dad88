"""A real vLLM of two ranks: a hit is what both of them hold, and a request counts once."""

from collections.abc import Callable

import pytest

from kvtier.testing.child import work_directory
from kvtier.testing.running_node import RunningNode
from kvtier.testing.vllm_server import VllmServer
from tests.vllm.servers import (
    RELEASES,
    STARTED,
    Answer,
    ask,
    await_hit,
    await_joined,
    await_stored,
    from_tier,
    prompt,
)

pytestmark = STARTED

NUM_RANKS = 2
SETTINGS = {
    "cpu.capacity": "96MiB",
    "cpu.slab": "8MiB",
    "ssd.capacity": "256MiB",
    "ssd.segment": "32MiB",
}


@pytest.mark.skipif(not RELEASES, reason="make test-vllm runs it")
def test_two_ranks_get_their_own_blocks_back(start: Callable[..., VllmServer]) -> None:
    asked = prompt(90)
    with work_directory() as directory:
        node = RunningNode(directory, SETTINGS)
        with (
            node.daemon() as daemon,
            start(RELEASES[0], "tiny", directory, tensor_parallel_size=NUM_RANKS) as vllm,
        ):
            vllm.await_ready().ask(prompt(91, 100))  # worker halves attach with their first step
            await_joined(node, NUM_RANKS)
            wanted = vllm.ask(asked)
            await_stored(node, 4 * NUM_RANKS, "cpu", "ssd")
            await_hit(vllm, node, asked, from_tier(wanted, 512, "cpu"))
            await_hit(vllm, node, asked, from_tier(wanted, 512, "ssd"), "cpu")
            assert ask(vllm, node, asked, cache_salt="another") == Answer(wanted)
            node.await_idle()
            assert node.metric("kvtier_loaded_tokens_total") == vllm.hit_tokens()
            assert "Traceback" not in vllm.child.log
            assert daemon.stop() == 0
