"""Real engine processes with their HTTP servers: alone, attached, and two on one daemon."""

import http.client
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode, complete, fetch, url_of

pytestmark = pytest.mark.slow

PROMPT_TOKENS = 5 * 64 + 20
FULL = 5 * 64


def prompt_of(seed: int, num_tokens: int = PROMPT_TOKENS) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(3, 256) for _ in range(num_tokens)]


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with work_directory() as directory:
        yield RunningNode(directory)


def text_of(answer: Any) -> str:
    text: str = answer["choices"][0]["text"]
    return text


def served_by(answer: Any) -> dict[str, int]:
    """Return the tokens of each tier, after a look at whether the account adds up."""
    account = answer["kvtier"]
    by_tier: dict[str, int] = account["tier_tokens"]
    usage = answer["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == sum(by_tier.values())
    assert usage["prompt_tokens"] == sum(by_tier.values()) + account["computed_tokens"]
    return {tier: count for tier, count in by_tier.items() if count}


@pytest.mark.long
def test_the_same_answer_alone_and_from_every_tier(node: RunningNode, tiny_folder: Path) -> None:
    prompt = prompt_of(1)
    alone, alone_url = node.engine(tiny_folder, "--alone")
    with alone:
        first = complete(alone_url, prompt)
        assert served_by(first) == {}
        right = text_of(first)
        assert alone.stop() == 0
    with node.daemon() as daemon:
        engine, url = node.engine(tiny_folder)
        with engine:
            await_true(lambda: node.stat()["engines"], "the engine is attached", 30)
            assert node.stat()["engines"][0]["pid"] == engine.pid
            cold = complete(url, prompt)
            assert (text_of(cold), served_by(cold)) == (right, {})
            warm = complete(url, prompt)
            assert text_of(warm) == right
            assert served_by(warm)["gpu"] >= FULL
            node.await_blocks("ssd", 5)
            lost = node.drop("gpu")["gpu"]
            assert lost >= FULL // 64
            from_cpu = complete(url, prompt)
            assert (text_of(from_cpu), served_by(from_cpu)) == (right, {"cpu": FULL})
            node.await_idle()
            assert node.drop("gpu", "cpu")["cpu"] == 5
            from_ssd = complete(url, prompt)
            assert (text_of(from_ssd), served_by(from_ssd)) == (right, {"ssd": FULL})
            assert from_ssd["kvtier"]["decision"] == "loaded"
            hits = node.await_idle()["lookup_blocks"]["hit"]
            assert (hits["cpu"], hits["ssd"]) == (5, 5)
            assert engine.stop() == 0
        assert daemon.stop() == 0
    with node.daemon():
        engine, url = node.engine(tiny_folder)
        with engine:
            await_true(lambda: node.stat()["engines"], "the engine is attached", 30)
            again = complete(url, prompt)
            assert (text_of(again), served_by(again)) == (right, {"ssd": FULL})


def test_two_engines_share_and_one_may_die(node: RunningNode, tiny_folder: Path) -> None:
    prompt = prompt_of(2)
    with (
        node.daemon(),
        node.start("engine", "--model", str(tiny_folder)) as first,
        node.start("engine", "--model", str(tiny_folder)) as second,
    ):
        first_url, second_url = url_of(first), url_of(second)
        await_true(lambda: len(node.stat()["engines"]) == 2, "both are attached", 30)
        cold = complete(first_url, prompt)
        node.await_blocks("ssd", 5)
        shared = complete(second_url, prompt)
        assert (text_of(shared), served_by(shared)) == (text_of(cold), {"cpu": FULL})
        abandon_stream(first_url, prompt_of(3, 900))
        await_true(
            lambda: "kvtier_requests_running 0.0" in fetch(f"{first_url}/metrics").decode(),
            "the client has gone and its request with it",
            20,
        )
        first.kill()
        await_true(lambda: len(node.stat()["engines"]) == 1, "its session is over")
        assert node.await_idle()["pins"] == 0
        again = complete(second_url, prompt)
        assert text_of(again) == text_of(cold)


def abandon_stream(url: str, prompt: list[int]) -> None:
    """Ask for a long answer, read its beginning, and go away."""
    body = {
        "model": json.loads(fetch(f"{url}/v1/models"))["data"][0]["id"],
        "prompt": prompt,
        "max_tokens": 100,
        "stream": True,
        "ignore_eos": True,
    }
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    reply = connection.getresponse()
    assert reply.readline().startswith(b"data: ")
    reply.close()
    connection.close()


def test_parameters_reach_the_tiers(node: RunningNode, tiny_folder: Path) -> None:
    """With an engine that was there before its daemon."""
    prompt = prompt_of(4)
    engine, url = node.engine(tiny_folder)
    with engine:
        alone = complete(url, prompt_of(5))
        assert alone["kvtier"]["decision"] == "computed:daemon_away"
        with node.daemon():
            await_true(lambda: node.stat()["engines"], "the engine is attached", 30)
            complete(url, prompt, kv_transfer_params={"max_offload_tokens": 130})
            assert node.await_blocks("cpu", 2)["tiers"]["cpu"]["tokens"] == 128
            node.drop("gpu")
            part = complete(url, prompt, kv_transfer_params={"max_load_tokens": 64})
            assert served_by(part) == {"cpu": 64}
            node.await_blocks("cpu", 5)
            node.drop("gpu")
            assert served_by(complete(url, prompt, cache_salt="alice")) == {}
            node.await_blocks("cpu", 10)
            node.drop("gpu")
            assert served_by(complete(url, prompt, cache_salt="alice")) == {"cpu": FULL}
