"""Two tenants of one engine, told apart by their API keys: no hit is ever shared, in any tier."""

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kvtier.api.http.tenant import key_salt
from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode
from tests.integration.certificates import write_secret

pytestmark = pytest.mark.slow

ALICE, EVE = "alice-0123456789abcdef", "eve-0123456789abcdef"
BLOCKS = 3
FULL = BLOCKS * 64


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with work_directory() as directory:
        yield RunningNode(directory)


def prompt_of(seed: int) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(3, 256) for _ in range(FULL + 20)]


def post(url: str, key: str | None, prompt: list[int], **more: Any) -> httpx.Response:
    body = {
        "model": "tiny-llama",
        "prompt": prompt,
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
    }
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/v1/completions", json=body | more, headers=headers, timeout=60)


def served_by(url: str, key: str, prompt: list[int], **more: Any) -> dict[str, int]:
    """Return the prompt tokens of each tier; the account holds nothing else of anybody's."""
    reply = post(url, key, prompt, **more)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    assert set(answer["kvtier"]) == {"tier_tokens", "computed_tokens", "decision"}
    by_tier = {tier: count for tier, count in answer["kvtier"]["tier_tokens"].items() if count}
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == sum(by_tier.values())
    return by_tier


def test_no_tenant_is_served_from_anothers_blocks(node: RunningNode, tiny_folder: Path) -> None:
    prompt = prompt_of(1)
    # Each is used once: whatever it hits is somebody else's.
    strangers = [f"stranger-{number:02}-0123456789" for number in range(9)]
    keys = write_secret(node.directory / "api-keys", "\n".join([ALICE, *strangers]))
    settings = {"engine__tenant_from": "api_key", "engine__api_keys_file": str(keys)}
    with node.daemon() as daemon:
        engine, url = node.engine(tiny_folder, **settings)
        with engine:
            await_true(lambda: node.stat()["engines"], "the engine is attached", 30)
            assert served_by(url, ALICE, prompt) == {}
            node.await_blocks("ssd", BLOCKS)
            for emptied, tier in (((), "gpu"), (("gpu",), "cpu"), (("gpu", "cpu"), "ssd")):
                if emptied:
                    node.await_idle()
                    node.drop(*emptied)
                for forged in ({}, {"cache_salt": key_salt(ALICE)}, {"cache_salt": ALICE}):
                    assert served_by(url, strangers.pop(), prompt, **forged) == {}, (tier, forged)
                hit = served_by(url, ALICE, prompt, cache_salt="another")
                assert set(hit) == {tier}
                assert hit[tier] >= FULL
            write_secret(keys, f"{EVE}\n")  # ours are withdrawn, and another one let in
            await_true(lambda: post(url, ALICE, prompt).status_code == 401, "it is refused", 30)
            assert served_by(url, EVE, prompt) == {}
            assert engine.stop() == 0
            for secret in (ALICE, key_salt(ALICE)):
                assert secret not in engine.log
                assert secret not in str(node.stat())
        assert daemon.stop() == 0


def test_who_has_no_key_is_told_so_and_costs_nothing(node: RunningNode, tiny_folder: Path) -> None:
    keys = write_secret(node.directory / "api-keys", f"{ALICE}\n")
    settings = {"engine__tenant_from": "api_key", "engine__api_keys_file": str(keys)}
    engine, url = node.engine(tiny_folder, "--alone", **settings)
    with engine:
        for key in (None, EVE):
            reply = post(url, key, prompt_of(2))
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
        refused = pytest.raises(openai.AuthenticationError)
        with openai.OpenAI(base_url=f"{url}/v1", api_key=EVE, max_retries=0) as client, refused:
            client.completions.create(model="tiny-llama", prompt=[5, 6], max_tokens=1)
        with openai.OpenAI(base_url=f"{url}/v1", api_key=ALICE, max_retries=0) as client:
            assert client.completions.create(model="tiny-llama", prompt=[5, 6], max_tokens=1).id
        metrics = httpx.get(f"{url}/metrics", timeout=20).text
        assert re.search(r'kvtier_requests_total\{outcome="refused"\} 3\.0', metrics)
        assert engine.stop() == 0


@pytest.mark.parametrize(
    ("text", "mode", "said"), [("", 0o600, "contains no key"), (ALICE, 0o644, "chmod 600")]
)
def test_a_file_of_keys_that_will_not_do_ends_the_start(
    node: RunningNode, tiny_folder: Path, text: str, mode: int, said: str
) -> None:
    keys = write_secret(node.directory / "api-keys", text, mode)
    options = {"engine__api_keys_file": str(keys)}
    for command in ("serve", "engine"):
        with node.start(command, "--model", str(tiny_folder), **options) as child:
            assert child.wait() == 2
            assert child.log.startswith("kvtier: engine.api_keys_file: "), child.log
            assert said in child.log
            assert ALICE not in child.log
            assert child.log.count("\n") == 1
