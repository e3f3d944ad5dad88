"""Run by the Python of an environment with vLLM: what this release asks of a connector, we have.

Its base class and ours are compared hook by hook; requests of its own are named by it and by us;
groups of each of its kinds of KV are served or refused; a release that is not served says so.
"""

import inspect
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import vllm
from vllm import envs
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1 import kv_cache_interface
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvtier.client import OwnTier
from kvtier.connectors.vllm import KvtierConnector, setup
from kvtier.connectors.vllm.block_identity import (
    BlockFacts,
    RankReport,
    adapter_of,
    can_be_named,
    extra_keys,
)
from kvtier.connectors.vllm.engine_state import own_tier
from kvtier.connectors.vllm_common import release as release_module
from kvtier.connectors.vllm_common.refusal import refusal
from kvtier.core.identity import chain_root, hash_blocks, tenant_digest
from kvtier.core.layout import KVLayout
from kvtier.testing.child import await_true

BLOCK_TOKENS = 64
NUM_REQUESTS = 400
SEED = 20261130

NEWER = {"get_external_cache_hit_sources", "has_pending_block_frees"}
"""Hooks of ours that the oldest release does not ask for."""


def public(kind: type) -> dict[str, Any]:
    return {
        name: member
        for name in dir(kind)
        if not name.startswith("_") and callable(member := getattr(kind, name))
    }


def check_hooks() -> None:
    assert not KvtierConnector.__abstractmethods__, KvtierConnector.__abstractmethods__
    theirs = public(KVConnectorBase_V1) | public(SupportsHMA)
    ours = public(KvtierConnector)
    for name in ours.keys() & theirs.keys():
        if ours[name] is not theirs[name]:
            check_signature(name, theirs[name], ours[name])
    strange = {name for name in ours.keys() - theirs.keys() if inspect.isfunction(ours[name])}
    assert strange <= NEWER, f"vLLM asks for none of {strange - NEWER}"
    assert not strange or not vllm.__version__.startswith("0.32"), strange


def check_signature(name: str, theirs: Callable[..., Any], ours: Callable[..., Any]) -> None:
    """Whatever a caller of vLLM's hook may give, by place or by name, ours must take."""
    asked = list(inspect.signature(theirs).parameters.values())
    had = inspect.signature(ours).parameters
    by_place = [p.name for p in asked if p.kind is p.POSITIONAL_OR_KEYWORD]
    taken = [p.name for p in had.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert taken[: len(by_place)] == by_place, f"{name}{tuple(by_place)} takes {taken}"
    for extra in list(had.values())[len(by_place) :]:
        is_open = extra.kind in {extra.VAR_POSITIONAL, extra.VAR_KEYWORD}
        assert is_open or extra.default is not extra.empty, f"{name} wants {extra.name} as well"
    for kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
        if any(p.kind is kind for p in asked):
            assert any(p.kind is kind for p in had.values()), f"{name} takes no {kind}"


def random_requests(chance: random.Random) -> Iterator[Request]:
    """Many requests that are nearly the same, so that each part must make the difference."""
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    digests = ["a" * 64, "b" * 64]
    for number in range(NUM_REQUESTS):
        media, place = [], 0
        while chance.random() < 0.5 and place < 200:
            offset, length = place + chance.choice([0, 1, 30, 64]), chance.choice([16, 64, 90])
            place = offset + length
            media.append(
                MultiModalFeatureSpec(
                    data=None,
                    modality="image",
                    identifier=chance.choice(digests),
                    mm_position=PlaceholderRange(offset=offset, length=length),
                )
            )
        lora = chance.choice(
            [None, None, *(LoRARequest(n, i, "/" + n) for i, n in ((1, "x"), (2, "y")))]
        )
        yield Request(
            request_id=str(number),
            prompt_token_ids=[7] * chance.choice([250, 260, 320]),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            mm_features=media,
            lora_request=lora,
            cache_salt=chance.choice([None, None, "s"]),
            block_hasher=hasher,
        )


def check_names() -> None:
    """What vLLM tells apart, we do: one name of ours never stands for two of vLLM's."""
    meant: dict[bytes, set[bytes]] = defaultdict(set)
    chance = random.Random(SEED)
    for request in random_requests(chance):
        assert can_be_named(request)
        adapter = request.lora_request.lora_name.encode() if request.lora_request else b""
        root = chain_root(bytes(16), tenant_digest(request.cache_salt))
        keys = extra_keys(request, adapter, BLOCK_TOKENS)
        ours = hash_blocks(root, list(request.all_token_ids), BLOCK_TOKENS, keys)
        assert len(ours) == len(request.block_hashes)
        for mine, theirs in zip(ours, request.block_hashes, strict=True):
            meant[mine].add(theirs)
    assert max(map(len, meant.values())) == 1, f"seed {SEED}"
    assert len(meant) < 4 * NUM_REQUESTS, "some requests had blocks in common"
    embedded = SimpleNamespace(prompt_embeds=torch.zeros(1), mm_features=[])
    assert not can_be_named(embedded)


def group_of(kind: type) -> Any:
    """Make a group of one kind of KV, whatever it wants to know."""
    known = {
        "block_size": 16,
        "num_kv_heads": 2,
        "head_size": 64,
        "dtype": torch.float32,
        "sliding_window": 128,
        "attention_chunk_size": 128,
        "rswa_window": 128,
        "sink_len": 16,
        "shapes": ((4,),),
        "dtypes": (torch.float32,),
        "page_size": 1024,
        "blocks_per_request": 2,
        "kv_cache_specs": {},
    }
    wanted = {field.name for field in fields(kind) if field.init and is_wanted(field)}
    return SimpleNamespace(kv_cache_spec=kind(**{name: known[name] for name in wanted}))


def is_wanted(field: Any) -> bool:
    return repr(field.default) == repr(field.default_factory)  # both are missing


def config_of(**settings: Any) -> Any:
    """Return as much of vLLM's configuration as decides what is served."""
    model = SimpleNamespace(model="m", is_encoder_decoder=False, enable_sleep_mode=False)
    settings = {"kv_transfer_config": SimpleNamespace(kv_role="kv_both")} | settings
    return SimpleNamespace(
        model_config=model,
        load_config=SimpleNamespace(load_format="auto"),
        cache_config=SimpleNamespace(cache_dtype="auto", enable_prefix_caching=True),
        parallel_config=SimpleNamespace(distributed_executor_backend="mp"),
        speculative_config=None,
        observability_config=SimpleNamespace(otlp_traces_endpoint=None),
        **settings,
    )


def check_groups() -> list[str]:
    """Each kind of KV that this vLLM knows is served, or refused by its name."""
    served = []
    for name, kind in vars(kv_cache_interface).items():
        if not name.endswith("Spec") or name.startswith("KVCache") or name == "AttentionSpec":
            continue
        group = group_of(kind)
        told = refusal(config_of(), SimpleNamespace(kv_cache_groups=[group]))
        if told:
            assert name in told, told
        else:
            served.append(name)
        both = SimpleNamespace(
            kv_cache_groups=[group_of(kv_cache_interface.FullAttentionSpec), group]
        )
        assert f"2 groups of KV (FullAttentionSpec, {name})" in refusal(config_of(), both)
    mixed = {"a": group_of(kv_cache_interface.FullAttentionSpec).kv_cache_spec}
    mixed["b"] = group_of(kv_cache_interface.SlidingWindowSpec).kv_cache_spec
    uniform = kv_cache_interface.UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=mixed)
    wrapped = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=uniform)])
    assert "layers with SlidingWindowSpec" in refusal(config_of(), wrapped)
    return served


class Written(SimpleNamespace):
    """As much of a model's configuration as is asked."""

    def to_json_string(self, use_diff: bool) -> str:
        return json.dumps(vars(self))


def connector_of(directory: Path, *groups: Any, load_format: str = "auto") -> Any:
    """Make the half for the scheduler, as vLLM makes it, beside a daemon that is not there."""
    transfer = KVTransferConfig(
        kv_connector="KvtierConnector",
        kv_connector_module_path="kvtier.connectors.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={"socket": str(directory / "k.sock")},
    )
    config = config_of(kv_transfer_config=transfer, kv_events_config=None)
    config.model_config.model = str(directory)
    config.load_config.load_format = load_format
    blocks = SimpleNamespace(kv_cache_groups=list(groups), num_blocks=8)
    return KvtierConnector(config, KVConnectorRole.SCHEDULER, blocks)


def hooks_of_a_step(connector: Any, request: Any) -> Any:
    """Ask what vLLM asks in a step, and return what the workers are told."""
    connector.on_new_request(request)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    nothing = SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
        ),
        num_scheduled_tokens={},
    )
    told = connector.build_connector_meta(nothing)
    assert connector.request_finished_all_groups(request, ([],)) == (False, None)
    return told


def check_start() -> None:
    """Without what has to be known vLLM gets neutral answers; with it, workers hear of it."""
    layout = KVLayout("vllm-lbhnc", 1, 64, 4096, "float32", "small")
    blocks = BlockFacts("{}", layout, "float32", "vllm", "auto", 1, 0, 4)
    served = group_of(kv_cache_interface.FullAttentionSpec)
    window = group_of(kv_cache_interface.SlidingWindowSpec)
    request = next(random_requests(random.Random(SEED)))
    with TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "model.safetensors").write_bytes(b"weights")
        # Files last changed in the far past as this process sees it.
        late = time.time_ns() + 3600 * 10**9
        with patch("kvtier.connectors.vllm.block_identity.began_ns", lambda: late):
            for groups, load_format in (((window,), "auto"), ((served,), "dummy")):
                connector = connector_of(directory, *groups, load_format=load_format)
                connector.set_xfer_handshake_metadata_pp_aware(
                    {(0, 0): handshake_of(RankReport(None, "refused"))}
                )
                assert not connector.has_pending_push_work()
                assert hooks_of_a_step(connector, request).weights == b""
                connector.shutdown()
            connector = connector_of(directory, served)
            assert hooks_of_a_step(connector, request).weights == b"", "no worker has told yet"
            request.lora_request = LoRARequest("sql", 1, "/a")
            hooks_of_a_step(connector, request)
            adapters = connector._resolver.adapters
            assert adapters.note(adapter_of(LoRARequest("sql", 2, "/b"))), (
                "names are noted from the first on"
            )
            request.lora_request = None
            assert connector.reset_cache()
            connector.set_xfer_handshake_metadata_pp_aware(
                {(0, 0): handshake_of(RankReport(blocks))}
            )
            assert connector.has_pending_push_work(), "a step, so that the workers hear of it"
            assert len(hooks_of_a_step(connector, request).weights) == 32
            assert connector._scheduler._cache_reset.is_due, "what was asked before it began"
            await_true(lambda: not connector.has_pending_push_work(), "it waits for no daemon")
            connector.shutdown()


def described(*names: str) -> str:
    """Return what blocks of these layers are said to be."""
    backend = SimpleNamespace(get_name=lambda: "ATTN")
    tensors = {name: torch.zeros(4, 2, 16, 128) for name in names}
    config = config_of(
        compilation_config=SimpleNamespace(
            static_forward_context=dict.fromkeys(names, SimpleNamespace(attn_backend=backend))
        ),
    )
    config.parallel_config.world_size, config.parallel_config.rank = 1, 0
    config.model_config.dtype = torch.float32
    group = group_of(kv_cache_interface.FullAttentionSpec)
    pages: Any = SimpleNamespace(block_bytes=4096, num_layers=len(names))
    blocks = SimpleNamespace(kv_cache_groups=[group])
    with (
        patch.object(setup, "layout_name", lambda _: "LBHNC"),
        patch.object(setup, "model_config", lambda _: "{}"),
    ):
        return setup.describe(config, blocks, tensors, pages).layout.detail


def check_description() -> None:
    """The layers count by their names and order, and on AMD's GPUs the order within a page."""
    names = ("model.layers.0.attn", "model.layers.1.attn", "model.layers.2.attn")
    stages = {described(*each) for each in (names[:2], names[1:], names[1::-1])}
    assert len(stages) == 3, stages
    assert described(*names[:2]) in stages
    device = torch.device("cuda")
    with (
        patch.object(torch.version, "hip", "6.4"),
        patch.object(torch.cuda, "get_device_capability", lambda _: (9, 4)),
    ):
        assert release_module._generation(device) == "rocm 9.4"
        with patch.dict("os.environ", {"VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": "1"}):
            assert envs.VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT
            assert release_module._generation(device) == "rocm 9.4 shuffled"


def check_pool() -> None:
    """Its block pool says how full it is, in the way in which we ask."""
    pool = BlockPool(9, True, 16)
    layout = KVLayout("vllm-lbhnc", 1, 64, 4096, "float32", "")
    assert own_tier(pool, layout, 4, 0) == OwnTier(8 * 1024, 0, 0, 0)
    taken = pool.get_new_blocks(3)
    assert own_tier(pool, layout, 4, 7) == OwnTier(8 * 1024, 3 * 1024, 3 * 16, 7)
    pool.free_blocks(taken)
    pool.cached_block_hash_to_block.insert(b"some hash", taken[0])
    assert own_tier(pool, layout, 4, None) == OwnTier(8 * 1024, 1024, 0, 0)


def handshake_of(facts: RankReport) -> Any:
    return SimpleNamespace(facts=facts)


def check_release() -> None:
    release_module.check_release()
    found = vllm.__version__
    try:
        for version in ("0.27.2", "0.33.0", "1.0.0", "dev"):
            vllm.__version__ = version
            assert f"serves vLLM 0.28 to 0.32, and this is {version}: " in refused()
    finally:
        vllm.__version__ = found


def refused() -> str:
    try:
        release_module.check_release()
    except ImportError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    check_hooks()
    check_names()
    served = check_groups()
    check_start()
    check_description()
    check_pool()
    check_release()
    print(json.dumps({"release": vllm.__version__, "served": served}))
