"""Several ``vllm serve`` beside one daemon: what one has stored is a hit for its like alone."""

from collections.abc import Callable

import pytest

from kvtier.testing.running_node import RunningNode
from kvtier.testing.vllm_server import VllmServer
from tests.vllm.servers import (
    ON_FIRST,
    RELEASES,
    STARTED,
    Answer,
    ask,
    await_hit,
    await_stored,
    from_tier,
    prompt,
    running,
)

pytestmark = STARTED


@ON_FIRST
def test_a_second_server_is_warm_from_the_first(
    vllm: VllmServer, served: RunningNode, start: Callable[..., VllmServer]
) -> None:
    asked = [prompt(70), prompt(71)]
    with running(served):
        wanted = [vllm.ask(each) for each in asked]
        await_stored(served, 8, "ssd")
    with start(RELEASES[0], "tiny", served.socket.parent) as second:
        second.await_ready().ask(prompt(73))  # its worker half attaches with its first step
        with running(served, num_servers=2):
            await_hit(second, served, asked[0], from_tier(wanted[0], 512, "ssd"), "cpu")
            await_hit(vllm, served, asked[0], from_tier(wanted[0], 512, "cpu"))
            fresh = prompt(72)
            right = second.ask(fresh)
            await_stored(served, 8, "cpu")
            await_hit(vllm, served, fresh, from_tier(right, 512, "cpu"))
            with second.asking(asked[1], 3000):
                second.kill()
            served.await_idle()
            assert ask(vllm, served, asked[1]).tokens == wanted[1]
            assert len(served.stat()["engines"]) == 2, "the dead one's sessions are gone"


@ON_FIRST
@pytest.mark.parametrize(
    ("model", "dtype"), [("other", "float32"), ("tiny", "bfloat16")], ids=["weights", "dtype"]
)
def test_another_one_finds_nothing(
    vllm: VllmServer,
    served: RunningNode,
    start: Callable[..., VllmServer],
    model: str,
    dtype: str,
) -> None:
    asked = prompt(80)
    with start(RELEASES[0], model, served.socket.parent, dtype=dtype) as other:
        other.await_ready()
        alone = other.ask(asked)
        with running(served, num_servers=2):
            wanted = vllm.ask(asked)
            await_stored(served, 4, "ssd")
            assert ask(other, served, asked) == Answer(alone)
            await_stored(served, 8, "ssd")
            await_hit(other, served, asked, from_tier(alone, 512, "cpu"))
            await_hit(vllm, served, asked, from_tier(wanted, 512, "cpu"))
