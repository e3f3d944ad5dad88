"""vLLM's ``OffloadingConnector``, extended to pass the identity of the chunks to kvtier's tier.

Its scheduler side knows the model. Its workers know the format of their pages, and report it in
vLLM's handshake once vLLM has started both. Imports vLLM.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvtier.connectors.kit.guard import guarded
from kvtier.connectors.vllm_common.refusal import layer_specs, refusal
from kvtier.connectors.vllm_common.release import arrangement, local_model, release
from kvtier.connectors.vllm_tier.identity import ModelFacts, model_facts, side_by_side
from kvtier.observe.log import Log

__all__ = ["KvtierOffloadingConnector"]

_log = Log("kvtier.vllm")


@dataclass
class _Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM is not there to be checked
    arranged: str
    refusal: str = ""


class KvtierOffloadingConnector(OffloadingConnector):  # type: ignore[misc]  # vLLM is not there to be checked
    """vLLM's connector for offloading; passes the model to tiers of type ``KvtierTier``."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._pages: Future[str] = Future()
        if role != KVConnectorRole.SCHEDULER:  # only the scheduler creates tiers
            super().__init__(vllm_config, role, kv_cache_config)
            return
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        with _model_added(extra, _facts_or_refusal(vllm_config, kv_cache_config, self._pages)):
            super().__init__(vllm_config, role, kv_cache_config)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        """Report the format of this worker's pages to the scheduler side."""
        config, blocks = self._vllm_config, self._kv_cache_config
        try:
            # Checked here too: a worker's layers may have disabled prefix caching.
            return _Handshake(_arranged(config, blocks), refusal(config, blocks))
        except Exception as error:  # whatever a device or backend raises, vLLM must start
            return _Handshake("", str(error) or type(error).__name__)

    @guarded(_log, lambda: None)
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Pass the format of the workers' pages to the tier."""
        if self._pages.done():
            return
        handshakes = [metadata[rank] for rank in sorted(metadata)]
        if not all(isinstance(each, _Handshake) for each in handshakes):
            reason = "MultiConnector has passed on another connector's handshake"
        else:
            reason = "; ".join(dict.fromkeys(each.refusal for each in handshakes if each.refusal))
        if reason:
            self._pages.set_exception(ValueError(reason))
        else:
            self._pages.set_result(side_by_side([each.arranged for each in handshakes]))


def _arranged(vllm_config: Any, kv_cache_config: Any) -> str:
    (group,) = kv_cache_config.kv_cache_groups
    device = torch.device(vllm_config.device_config.device_type)
    spec = layer_specs(group.kv_cache_spec)[0]
    return arrangement(vllm_config, spec, group.layer_names, device)


def _facts_or_refusal(
    vllm_config: Any, kv_cache_config: Any, pages: Future[str]
) -> ModelFacts | str:
    """Return the facts about the model, or why its chunks are not cached."""
    find_files = partial(local_model, vllm_config)
    try:
        return model_facts(vllm_config, kv_cache_config, release(), find_files, pages)
    except Exception as error:  # whatever the configuration contains, vLLM must start
        return str(error) or type(error).__name__


@contextmanager
def _model_added(extra: Mapping[str, Any], model: ModelFacts | str) -> Iterator[None]:
    """Add the model to the settings of kvtier's tiers while vLLM creates them."""
    tiers = [
        each
        for each in extra.get("secondary_tiers", ())
        if isinstance(each, dict) and each.get("type") == "KvtierTier"
    ]
    for settings in tiers:
        settings["model"] = model
    try:
        yield
    finally:
        for settings in tiers:
            del settings["model"]
