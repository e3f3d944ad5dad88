"""Real ``vllm serve`` processes beside a real daemon: the same answers, with blocks from a tier."""

from typing import Any

from kvtier.testing.running_node import RunningNode
from kvtier.testing.vllm_server import VllmServer
from tests.vllm.servers import (
    ON_EACH,
    STARTED,
    TIERS,
    Answer,
    ask,
    await_hit,
    await_stored,
    from_tier,
    prompt,
    running,
)

pytestmark = STARTED


@ON_EACH
def test_blocks_come_back_from_each_tier(vllm: VllmServer, served: RunningNode) -> None:
    asked = prompt(1)
    wanted = vllm.ask(asked)  # without a daemon
    with running(served):
        assert ask(vllm, served, asked) == Answer(wanted)
        await_stored(served, 4, *TIERS)
        for dropped, tier in zip(((), ("cpu",), ("cpu", "ssd")), TIERS, strict=True):
            await_hit(vllm, served, asked, from_tier(wanted, 512, tier), *dropped)


@ON_EACH
def test_another_salt_finds_nothing(vllm: VllmServer, served: RunningNode) -> None:
    asked = prompt(2)
    with running(served):
        wanted = vllm.ask(asked, cache_salt="one")
        await_stored(served, 4, "ssd")
        await_hit(vllm, served, asked, from_tier(wanted, 512, "cpu"), cache_salt="one")
        assert ask(vllm, served, asked, cache_salt="another") == Answer(wanted)
        assert ask(vllm, served, asked) == Answer(wanted)


@ON_EACH
def test_a_daemon_that_goes_freezes_and_comes_back(vllm: VllmServer, served: RunningNode) -> None:
    asked = prompt(3)
    with running(served):
        wanted = vllm.ask(asked)
        await_stored(served, 4, "ssd")
    before = vllm.hit_tokens()
    vllm.forget()
    assert vllm.ask(asked) == wanted
    assert vllm.hit_tokens() == before, "it is away"
    with running(served) as daemon:
        await_hit(vllm, served, asked, from_tier(wanted, 512, "ssd"), "cpu")
        vllm.forget()
        with daemon.stopped():
            assert vllm.ask(asked) == wanted
        await_hit(vllm, served, asked, from_tier(wanted, 512, "cpu"))


@ON_EACH
def test_limits_of_a_request(vllm: VllmServer, served: RunningNode) -> None:
    def limited(**limits: int) -> dict[str, Any]:
        return {"kv_transfer_params": limits}

    asked = prompt(4)
    with running(served):
        wanted = vllm.ask(asked, **limited(max_offload_tokens=300))
        await_stored(served, 2, "ssd")
        assert ask(vllm, served, asked, **limited(max_load_tokens=0)) == Answer(wanted)
        await_stored(served, 4, "ssd")
        for most, loaded in ((127, 0), (300, 256), (10_000, 512)):
            answer = ask(vllm, served, asked, **limited(max_load_tokens=most))
            assert (answer.tokens, answer.loaded) == (wanted, loaded)
