"""The parts of the tier behind vLLM's CPU tier, against a real daemon and without vLLM."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest

from kvtier.client import Client, ClientDeadlines
from kvtier.connectors.kit.guard import guarded
from kvtier.connectors.vllm_tier.chain import ChunkChain, ChunkRun
from kvtier.connectors.vllm_tier.identity import (
    ModelFacts,
    chunk_layout,
    model_facts,
    side_by_side,
)
from kvtier.connectors.vllm_tier.requests import ChunkAnswer, Requests
from kvtier.connectors.vllm_tier.transfers import ChunkTransfers, Ended
from kvtier.core.identity import BlockHash
from kvtier.core.layout import KVLayout
from kvtier.core.request import RequestTraits
from kvtier.observe.log import Log
from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode

CHUNK_BYTES = 8192
NUM_CHUNKS = 128
DEADLINES = ClientDeadlines(lookup_s=5, load_s=10, store_s=10, reconnect_s=0.1)
HASTY = ClientDeadlines(lookup_s=0.25, load_s=0.5, store_s=0.5, reconnect_s=0.1)
PAGES = "1x(flash,cuda 9.0)"
FACTS = ModelFacts("small", Path, "{}", "float16", "auto", "vllm test", Future())


def names(num: int, prompt: int = 0) -> list[bytes]:
    return [bytes([prompt, place]) * 18 for place in range(num)]


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with work_directory() as directory:
        yield RunningNode(directory)


class SmallTier:
    """One engine's tier; a request knows its chunks as soon as it is there."""

    def __init__(self, node: RunningNode, deadlines: ClientDeadlines = DEADLINES) -> None:
        layout = KVLayout("vllm-chunk", 1, 64, CHUNK_BYTES, "float16", "small")
        space = FACTS.space(bytes(32), layout, PAGES)
        self.client = Client(node.socket, space, "small", deadlines=deadlines)
        self.client.start()
        self.memory = bytearray(NUM_CHUNKS * CHUNK_BYTES)
        self.view = memoryview(self.memory).cast("b").cast("b", (NUM_CHUNKS, CHUNK_BYTES))
        self.rows = np.asarray(self.view).view(np.uint8)
        self.requests = Requests(self.client, space.digest)
        self.transfers = ChunkTransfers(self.client, self.view)
        self.ended: list[Ended] = []
        self._jobs = count()

    def __enter__(self) -> Self:
        assert self.client.wait_attached(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.requests.close()
        self.transfers.close(0.1)
        self.client.close()

    def begin(self, request_id: str, chunks: Sequence[bytes]) -> None:
        self.requests.add(
            request_id,
            RequestTraits(request_id if len(request_id) < 100 else ""),
            lambda first: chunks[first:],
        )

    def await_answers(self, request_id: str, chunks: Sequence[bytes]) -> list[ChunkAnswer]:
        """Ask in step after step until nothing is to be answered later."""

        def look() -> list[ChunkAnswer] | None:
            answers = [self.requests.ask(request_id, name) for name in chunks]
            self.requests.end_step()
            return None if ChunkAnswer.LATER in answers else answers

        found: list[ChunkAnswer] = await_true(look, "all is answered")
        return found

    def load(self, request_id: str, chunks: dict[bytes, int]) -> int:
        job = next(self._jobs)
        order = self.requests.order(job, request_id, chunks.items())
        self.transfers.load(order, len(chunks))
        return job

    def store(self, request_id: str, chunks: dict[bytes, int]) -> int:
        job = next(self._jobs)
        order = self.requests.order(job, request_id, chunks.items())
        self.transfers.store(order, len(chunks))
        return job

    def await_ended(self, job: int) -> Ended:
        def look() -> list[Ended]:
            self.ended += self.transfers.take_ended()
            return [each for each in self.ended if each.job == job]

        (ended,) = await_true(look, "the job is over")
        assert isinstance(ended, Ended)
        return ended


def test_a_hash_says_where_its_chunk_is() -> None:
    chain, later = ChunkChain(BlockHash(bytes(16))), ChunkChain(BlockHash(bytes(16)))
    chain.learn(names(3))
    later.learn(names(3)[1:])
    assert chain.hashes[0].hex() == "6899380c5085d6c80b611f2ed0f2daf9"
    assert not set(chain.hashes) & set(later.hashes)
    other = ChunkChain(BlockHash(b"\x01" * 16))
    other.learn(names(3))
    assert not set(chain.hashes) & set(other.hashes), "the root is the key space's"


def test_a_chain_takes_names_in_their_order_only() -> None:
    chain = ChunkChain(BlockHash(bytes(16)))
    chain.learn(names(4))
    known = list(chain.hashes)
    for heard in ([], names(4), names(4)[1:], names(6)[2:], names(5, prompt=1)):
        chain.learn(heard)
        assert chain.hashes == known
    chain.extend(names(1))
    assert chain.hashes == known, "no name comes twice"
    chain.learn(names(6))
    assert chain.hashes[:4] == known
    assert [chain.place(name) for name in names(7)] == [0, 1, 2, 3, 4, 5, None]


def test_chunks_are_put_in_order_and_cut_at_gaps() -> None:
    chain = ChunkChain(BlockHash(bytes(16)))
    chain.learn(all_names := names(6))
    chunks = dict(zip(all_names, range(10, 16), strict=True))
    asked = [*reversed(all_names[3:5]), all_names[0], *names(1, prompt=1)]
    assert chain.runs([(name, chunks.get(name, 99)) for name in asked]) == [
        ChunkRun(0, [all_names[0]], [10]),
        ChunkRun(3, all_names[3:5], [13, 14]),
    ]
    assert chain.runs([]) == []


@pytest.mark.slow
def test_chunks_go_out_and_come_back(node: RunningNode) -> None:
    chunks = names(5)
    with node.daemon(), SmallTier(node) as small:
        small.begin("one", chunks)
        assert small.await_answers("one", chunks) == [ChunkAnswer.MISS] * 5
        small.rows[:5] = np.arange(5, dtype=np.uint8)[:, None] + 1
        stored = small.await_ended(small.store("one", dict(zip(chunks, range(5), strict=True))))
        assert (stored.is_whole, stored.num_bytes) == (True, 5 * CHUNK_BYTES)
        small.requests.finish("one")

        small.begin("two", [*chunks[:3], *names(2, prompt=1)])
        asked = [*chunks[:3], *names(2, prompt=1)]
        assert (
            small.await_answers("two", asked[1:]) == [ChunkAnswer.HIT] * 2 + [ChunkAnswer.MISS] * 2
        )
        loaded = small.await_ended(small.load("two", {chunks[1]: 21, chunks[2]: 22}))
        assert loaded.is_whole
        assert (small.rows[[21, 22]] == small.rows[[1, 2]]).all()
        assert not small.rows[23:].any()
        node.await_idle()


@pytest.mark.slow
def test_what_did_not_come_is_missing_from_then_on(node: RunningNode) -> None:
    chunks = names(5)
    with node.daemon(), SmallTier(node) as small:
        small.begin("one", chunks)
        small.await_ended(small.store("one", dict(zip(chunks, range(5), strict=True))))
        assert small.await_answers("one", chunks) == [ChunkAnswer.HIT] * 5
        node.drop("cpu", "ssd")
        loaded = small.await_ended(
            small.load("one", dict(zip(chunks[1:], range(9, 13), strict=True)))
        )
        assert (loaded.is_whole, loaded.names, loaded.missing) == (False, (), chunks[1:])
        small.requests.forget("one", loaded.missing)
        assert small.await_answers("one", chunks) == [ChunkAnswer.HIT] + [ChunkAnswer.MISS] * 4


@pytest.mark.slow
def test_nobody_is_answered_later_for_ever(node: RunningNode) -> None:
    small = SmallTier(node)
    small.begin("alone", names(2))
    assert small.requests.ask("alone", names(1)[0]) is ChunkAnswer.MISS, "there is no daemon"
    with node.daemon(), small:
        small.begin("strange", names(2))
        assert small.await_answers("strange", names(1, prompt=7)) == [ChunkAnswer.MISS]
        assert small.requests.ask("never heard of", names(1)[0]) is ChunkAnswer.MISS
        small.begin("a" * 1000, names(2))
        assert small.await_answers("a" * 1000, names(2)) == [ChunkAnswer.MISS] * 2
        for request_id in ("strange", "a" * 1000, "a" * 1000, "never heard of"):
            small.requests.finish(request_id)
        await_true(lambda: not node.stat()["leases"], "nothing is held")


@pytest.mark.slow
def test_each_job_ends_once_while_the_daemon_hangs(node: RunningNode) -> None:
    chunks = names(2)
    with node.daemon() as daemon, SmallTier(node, HASTY) as small:
        small.begin("one", chunks)
        small.await_ended(small.store("one", dict(zip(chunks, range(2), strict=True))))
        small.await_answers("one", chunks)
        with daemon.stopped():
            jobs = [small.load("one", dict(zip(chunks, (5, 6), strict=True)))]
            jobs += [small.store("one", {chunks[0]: 0}) for _ in range(100)]
            ended = small.transfers.take_ended()
            assert len(ended) >= 36, "more than 64 do not wait"
            small.transfers.drain(0.0)
            small.rows[:] = 7
        small.transfers.drain(10.0)
        node.await_idle()
        assert (small.rows == 7).all(), "nothing comes late"
        ended += small.transfers.take_ended()
        assert sorted(each.job for each in ended) == jobs


@pytest.mark.slow
def test_a_job_without_a_thread_ends_once(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = threading.Thread.start, []

    def start_none_of_ours(thread: threading.Thread) -> None:
        if thread.name.startswith(("kvtier-store", "kvtier-load")) and len(refused) < 2:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    chunks = names(2)
    with node.daemon(), SmallTier(node) as small:
        monkeypatch.setattr(threading.Thread, "start", start_none_of_ours)
        small.begin("one", chunks)
        failed = [small.store("one", {chunks[0]: 0}), small.load("one", {chunks[0]: 9})]
        assert [small.await_ended(job).is_whole for job in failed] == [False, False]
        assert len(refused) == 2
        # The work of the failed ones is still queued, before that of these.
        stored = small.await_ended(small.store("one", {chunks[0]: 0}))
        loaded = small.await_ended(small.load("one", {chunks[0]: 9}))
        assert (stored.is_whole, loaded.is_whole) == (True, True)
        assert sorted(each.job for each in small.ended) == [0, 1, 2, 3]
        node.await_idle()


@pytest.mark.slow
def test_memory_is_let_go_of(node: RunningNode) -> None:
    chunks = names(2)
    with node.daemon() as daemon, SmallTier(node, HASTY) as small, ExitStack() as hung:
        small.begin("one", chunks)
        hung.enter_context(daemon.stopped())
        small.store("one", dict(zip(chunks, range(2), strict=True)))
        small.load("one", dict(zip(chunks, range(2), strict=True)))
        small.close()
        del small.rows
        small.view.release()  # fails while somebody has a part of it


def test_how_a_chunk_is_arranged_is_part_of_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    config = _config()
    layout = chunk_layout(config, CHUNK_BYTES)
    assert (layout.name, layout.block_tokens, layout.block_bytes) == ("vllm-chunk", 64, CHUNK_BYTES)
    spaces = {FACTS.space(bytes(32), layout, PAGES).digest}
    for changed in (
        _config(kv_cache_layout="BLHNC"),
        _config(canonical_layout=True),
        _config(replicated_layout=True),
        _config(worker_kv_bytes_per_block=1),
        _config(groups=(_group(layer_names=("a", "c")),)),
        _config(groups=(_group(tokens_per_block=32),)),
        _config(tp_size=2, world_size=2),
    ):
        spaces.add(FACTS.space(bytes(32), chunk_layout(changed, CHUNK_BYTES), PAGES).digest)
    for facts in (
        replace(FACTS, config='{"rope": 2}'),
        replace(FACTS, codec="fp8"),
        replace(FACTS, engine="vllm 0.99"),
        replace(FACTS, compute_dtype="bfloat16"),
    ):
        spaces.add(facts.space(bytes(32), layout, PAGES).digest)
    for pages in ("1x(flashinfer,cuda 9.0)", "1x(flash,cuda 8.9)", "2x(flash,cuda 9.0)"):
        spaces.add(FACTS.space(bytes(32), layout, pages).digest)
    spaces.add(FACTS.space(b"\x01" * 32, layout, PAGES).digest)
    assert len(spaces) == 16, "each of them is another"
    with pytest.raises(ValueError, match="2 groups of KV"):
        chunk_layout(_config(groups=(_group(), _group())), CHUNK_BYTES)
    with pytest.raises(ValueError, match="VLLM_KV_CACHE_LAYOUT"):
        chunk_layout(_config(kv_cache_layout=None), CHUNK_BYTES)


def test_pages_of_workers_are_told_in_their_order() -> None:
    assert side_by_side(["a,cuda 9.0"] * 4) == "4x(a,cuda 9.0)"
    assert side_by_side(["a", "a", "b"]) == "2x(a) 1x(b)" != side_by_side(["a", "b", "b"])


def test_what_a_tier_cannot_tell_apart_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role="kv_consumer"),
        weight_transfer_config=object(),
        model_config=SimpleNamespace(model="m", is_multimodal_model=True, enable_sleep_mode=True),
        load_config=SimpleNamespace(load_format="dummy"),
        cache_config=SimpleNamespace(
            cache_dtype="auto", prefix_caching_hash_algo="xxhash", enable_prefix_caching=False
        ),
        parallel_config=SimpleNamespace(distributed_executor_backend="mp"),
        speculative_config=None,
        lora_config=object(),
    )
    with pytest.raises(ValueError, match="dummy") as refused:
        model_facts(config, SimpleNamespace(kv_cache_groups=[]), (0, 28), Path, Future())
    reasons = ("xxhash", "prefix caching is off", "PYTHONHASHSEED", "LoRA", "media", "0 groups")
    for reason in (*reasons, "kv_consumer", "weight_transfer_config", "enable_sleep_mode"):
        assert reason in str(refused.value)


def test_what_goes_wrong_in_a_hook_stays_there() -> None:
    @guarded(Log("kvtier.test"), lambda: 7)
    def hook(number: int) -> float:
        return 1 / number

    assert hook(2) == 0.5
    assert hook(0) == 7


def _group(**more: Any) -> Any:
    return SimpleNamespace(**{"tokens_per_block": 16, "layer_names": ("a", "b")} | more)


def _config(**more: Any) -> Any:
    """Return what vLLM tells its tiers, with some of it changed."""
    parallel = {
        name: more.pop(name, 1) for name in ("world_size", "tp_size", "pp_size", "pcp_size")
    }
    fields: dict[str, Any] = {
        "groups": (_group(),),
        "cache": SimpleNamespace(blocks_per_chunk=4, tokens_per_hash=16),
        "model": SimpleNamespace(dtype="float16"),
        "worker_kv_bytes_per_block": 2048,
        "parallel": SimpleNamespace(**parallel),
        "replicated_layout": False,
        "canonical_layout": False,
        "kv_cache_layout": "LBHNC",
    }
    return SimpleNamespace(**fields | more)
