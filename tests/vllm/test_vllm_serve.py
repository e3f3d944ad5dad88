"""Real ``vllm serve`` processes beside a real daemon: answers are the same, and come from a tier.

``make test-vllm`` makes the environments and runs this; each release is one of them.
"""

import http.client
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtier.testing.child import Child, await_true, free_port, work_directory
from kvtier.testing.served import Served, fetch

ROOT = Path(__file__).resolve().parent.parent.parent
RELEASES = os.environ.get("KVTIER_VLLM", "").split()
"""Which of the environments in ``.vllm`` to run in."""

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not RELEASES, reason="make test-vllm runs it"),
]

START_TIMEOUT_S = 300.0
"""vLLM imports itself in three processes; on a busy machine that takes minutes."""


@dataclass
class Vllm:
    """One server, and the daemon it is told of, which may be away."""

    node: Served
    port: int

    def ask(self, prompt: list[int], num_tokens: int = 16, **more: Any) -> list[int]:
        """Return the tokens of the greedy answer."""
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = json.loads(fetch(f"{self._url}/v1/completions", body | more))
        tokens = answer["choices"][0]["token_ids"]
        assert isinstance(tokens, list)
        return tokens

    def forget(self) -> None:
        """Have it empty its own cache, as soon as no store holds a block of it."""
        await_true(self._reset, "its own cache is empty")

    def hit_tokens(self) -> float:
        """Return how many tokens it has had from us."""
        text = fetch(f"{self._url}/metrics").decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "vllm:external_prefix_cache_hits_total"
        )

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _reset(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("POST", "/reset_prefix_cache")
            return bool(json.loads(connection.getresponse().read())["success"])
        finally:
            connection.close()


@pytest.fixture(scope="module", params=RELEASES)
def vllm(request: pytest.FixtureRequest) -> Iterator[Vllm]:
    home = ROOT / ".vllm" / request.param
    with work_directory() as directory:
        model = directory / "tiny"
        words = [str(home / "bin/python"), str(ROOT / "scripts/vllm_model.py"), "tiny", str(model)]
        with Child(words, directory / "model.log") as maker:
            assert maker.wait(START_TIMEOUT_S) == 0, maker.log
        node, port = Served(directory), free_port()
        transfer = {
            "kv_connector": "KvtierConnector",
            "kv_connector_module_path": "kvtier.connectors.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"socket": str(node.socket)},
        }
        options = {
            "host": "127.0.0.1",
            "port": str(port),
            "served-model-name": "m",
            "dtype": "float32",
            "max-model-len": "4096",
            "num-gpu-blocks-override": "64",
            "kv-transfer-config": json.dumps(transfer),
        }
        flags = [word for name, value in options.items() for word in (f"--{name}", value)]
        environment = {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
        }
        words = [str(home / "bin/vllm"), "serve", str(model), "--enforce-eager", *flags]
        with Child(words, directory / "vllm.log", environment) as server:
            server.await_log("Application startup complete", START_TIMEOUT_S)
            yield Vllm(node, port)
            server.stop()  # it ends its own processes, which a kill would leave behind


def prompt(seed: int, num_tokens: int = 600) -> list[int]:
    return [2 + (seed * 7919 + place * place * 31 + place) % 250 for place in range(num_tokens)]


def test_blocks_come_back_from_each_tier(vllm: Vllm) -> None:
    asked = prompt(1)
    wanted = vllm.ask(asked)  # without a daemon
    assert vllm.hit_tokens() == 0
    with vllm.node.daemon() as daemon:
        await_true(lambda: len(vllm.node.stat()["engines"]) == 2, "both halves are attached")
        vllm.forget()
        assert vllm.ask(asked) == wanted
        await_true(lambda: vllm.node.stat()["tiers"]["ssd"]["blocks"] == 4, "blocks are stored")
        for tier in ("cpu", "ssd"):
            before = vllm.hit_tokens()
            vllm.forget()
            assert vllm.ask(asked) == wanted
            assert vllm.hit_tokens() - before == 512, tier
            assert vllm.node.stat()["lookup_blocks"]["hit"][tier] >= 4
            vllm.node.drop("cpu")
        before = vllm.hit_tokens()
        vllm.forget()
        assert vllm.ask(asked, cache_salt="another") == wanted
        assert vllm.hit_tokens() == before, "another tenant finds nothing"
        with daemon.stopped():
            vllm.forget()
            assert vllm.ask(asked) == wanted
        daemon.kill()
    vllm.forget()
    assert vllm.ask(asked) == wanted
