"""Run by the Python of an environment with vLLM: its own events and ours of the same requests.

What vLLM tells routers of its blocks as it computes them, and what we tell of the same blocks in
the daemon's tiers, name them in the same words; both go through vLLM's own publisher.
"""

import time
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import vllm
import zmq
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisherFactory,
    KVEventBatch,
)
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from kvtier.connectors.kit.chains import RankChains
from kvtier.connectors.vllm.kv_events import KvEvents, open_events
from kvtier.core.identity import NO_TENANT
from kvtier.core.residency import TierName
from kvtier.core.residency_change import RESYNC, ResidencyChange
from kvtier.core.table import as_keys
from kvtier.testing.child import await_true

SPACE = b"some key space.."
ENGINE_TOKENS, RATIO = 16, 4
BLOCK_TOKENS = ENGINE_TOKENS * RATIO
NUM_TOKENS = 3 * BLOCK_TOKENS + 5

SPEC = FullAttentionSpec(block_size=ENGINE_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32)
CONFIG = KVCacheConfig(
    num_blocks=100, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], SPEC)]
)


def picture(offset: int) -> MultiModalFeatureSpec:
    place = PlaceholderRange(offset=offset, length=40)
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=f"{offset:064x}", mm_position=place
    )


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "salted": {"cache_salt": "alice"},
    "adapted": {"lora_request": LoRARequest("wolf", 7, "/adapters/wolf")},
    "pictured": {"mm_features": [picture(10), picture(100)]},
}


def request(name: str, first_token: int, **more: Any) -> Request:
    hasher = get_request_block_hasher(ENGINE_TOKENS, sha256)
    tokens = list(range(first_token, first_token + NUM_TOKENS))
    return Request(name, tokens, SamplingParams(), None, block_hasher=hasher, **more)


def followed(events: KvEvents, asked: Request) -> Any:
    chains = RankChains([SPACE], NO_TENANT, BLOCK_TOKENS)
    chains.extend(asked.all_token_ids)
    tracked = SimpleNamespace(request=asked, chains=chains, num_followed=0)
    events.router_feed.follow(tracked)
    return chains.first(3)[0]


def change(tier: TierName, hashes: Any, *, is_there: bool = True) -> ResidencyChange:
    return ResidencyChange(tier, is_there, as_keys(b"".join(hashes)))


def of_blocks(told: list[Any]) -> dict[Any, tuple[Any, ...]]:
    """Return by its hash what was said of each block of vLLM, however it was put together."""
    blocks = {}
    for event in told:
        assert isinstance(event, BlockStored)
        parent = event.parent_block_hash
        for place, name in enumerate(event.block_hashes):
            first = place * event.block_size
            tokens = event.token_ids[first : first + event.block_size]
            keys = tuple(event.extra_keys[place] or ()) if event.extra_keys else ()
            group = (event.group_idx, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)
            adapter = (event.lora_id, event.lora_name)
            blocks[name] = (parent, tuple(tokens), event.block_size, keys, group, adapter)
            parent = name
    return blocks


def manager() -> KVCacheManager:
    return KVCacheManager(
        CONFIG,
        max_model_len=1000,
        scheduler_block_size=ENGINE_TOKENS,
        hash_block_size=ENGINE_TOKENS,
        enable_kv_cache_events=True,
    )


def check_same_words() -> None:
    """Whatever decides a block besides its tokens is told as vLLM tells it."""
    for number, (kind, more) in enumerate(KINDS.items()):
        events, vllms = KvEvents(SPEC, BLOCK_TOKENS, RATIO), manager()
        asked = request(kind, 1000 * number, **more)
        hashes = followed(events, asked)
        events.router_feed.listener()([RESYNC, change(TierName.CPU, hashes)])
        vllms.allocate_slots(asked, NUM_TOKENS)
        theirs, ours = of_blocks(vllms.take_events()), events.take(vllms.block_pool)
        assert len(ours) == 1, kind
        assert ours[0].medium == "CPU"
        assert of_blocks(ours) == theirs, kind
        assert len(theirs) == 12, kind


def check_reset() -> None:
    """What vLLM says of its own pool voids what routers know of ours, so they hear it again."""
    events, vllms = KvEvents(SPEC, BLOCK_TOKENS, RATIO), manager()
    asked = request("reset", 0)
    hashes = followed(events, asked)
    events.router_feed.listener()([change(TierName.SSD, hashes)])
    first = events.take(vllms.block_pool)
    assert first[0].medium == "STORAGE"
    assert not events.take(vllms.block_pool)
    assert vllms.reset_prefix_cache()
    told = vllms.take_events() + events.take(vllms.block_pool)
    assert isinstance(told[0], AllBlocksCleared)
    assert isinstance(told[1], BlockRemoved)
    assert told[2:] == first
    assert not events.take(vllms.block_pool)


def check_published() -> None:
    """Everything goes over vLLM's publisher as a router reads it."""
    events = KvEvents(SPEC, BLOCK_TOKENS, RATIO)
    hashes = followed(events, request("published", 0, **KINDS["salted"]))
    listener = events.router_feed.listener()
    listener([change(TierName.CPU, hashes), change(TierName.SSD, hashes)])
    told = [*events.take(None)]
    listener([change(TierName.CPU, hashes, is_there=False)])
    told += events.take(None)
    config = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint="inproc://kvtier-events"
    )
    publisher = EventPublisherFactory.create(config)
    reader = zmq.Context.instance().socket(zmq.SUB)
    reader.connect("inproc://kvtier-events")
    reader.subscribe(b"")
    try:

        def sent() -> Any:
            publisher.publish(KVEventBatch(ts=time.time(), events=told))
            return reader.recv_multipart() if reader.poll(100) else None

        got = msgspec.msgpack.decode(await_true(sent, "the reader gets it")[2])[1]
    finally:
        publisher.shutdown()
        reader.close(0)
    cpu, storage, removed = got
    assert [each["type"] for each in got] == ["BlockStored", "BlockStored", "BlockRemoved"]
    assert [each["medium"] for each in got] == ["CPU", "STORAGE", "CPU"]
    assert removed["block_hashes"] == cpu["block_hashes"] == storage["block_hashes"]
    assert cpu["token_ids"] == list(range(3 * BLOCK_TOKENS))


def check_asked_for() -> None:
    """There are none where nobody asked for them."""
    for wanted in (None, KVEventsConfig(enable_kv_cache_events=False)):
        config = SimpleNamespace(kv_events_config=wanted)
        assert open_events(config, CONFIG, BLOCK_TOKENS, RATIO, 1) is None


init_none_hash(sha256)
check_same_words()
check_reset()
check_published()
check_asked_for()
print(f"{vllm.__version__}: ok")
