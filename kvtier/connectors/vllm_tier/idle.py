"""A connector and a tier that serve nothing, used if the real ones cannot be imported.

vLLM then keeps its own CPU tier, without kvtier's tier behind it.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

from kvtier.connectors.vllm_common.unserved import say_idle

__all__ = ["idle_offloading_connector", "idle_tier"]

_OURS = "KvtierTier"


@cache
def idle_offloading_connector(reason: str) -> type:
    """Return a subclass of vLLM's ``OffloadingConnector`` that leaves out kvtier's tiers."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )

    class IdleOffloadingConnector(OffloadingConnector):  # type: ignore[misc]  # vLLM is not there to be checked
        """Offloads to vLLM's own tiers alone."""

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            extra = vllm_config.kv_transfer_config.kv_connector_extra_config
            tiers = extra.get("secondary_tiers", ())
            others = [tier for tier in tiers if tier.get("type") != _OURS]
            if len(others) < len(tiers):
                extra["secondary_tiers"] = others
            super().__init__(vllm_config, role, kv_cache_config)
            if role == KVConnectorRole.SCHEDULER:  # log it once, not in each worker
                say_idle(reason)

    return IdleOffloadingConnector


@cache
def idle_tier(reason: str) -> type:
    """Return a tier class for users of vLLM's own ``OffloadingConnector``."""
    from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

    class IdleTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not there to be checked
        """A tier that holds nothing; each job fails at once."""

        def __init__(
            self,
            offloading_spec: Any,
            primary_kv_view: memoryview,
            tier_type: str,
            *detector: Any,
            **_settings: object,
        ) -> None:
            super().__init__(offloading_spec, primary_kv_view, tier_type, *detector)
            self._jobs: list[Any] = []
            say_idle(reason)

        def lookup(self, *_: object, **__: object) -> Any:
            return LookupResult.MISS

        def submit_store(self, job_metadata: Any) -> None:
            self._jobs.append(job_metadata.job_id)

        def submit_load(self, job_metadata: Any) -> None:
            self._jobs.append(job_metadata.job_id)

        def get_finished_jobs(self) -> Iterable[Any]:
            jobs, self._jobs = self._jobs, []
            return [JobResult(job_id=job, success=False) for job in jobs]

        def on_new_request(self, *_: object, **__: object) -> Any:
            return RequestOffloadingContext()

        def drain_jobs(self) -> None:
            """Return at once: no job is ever running."""

    return IdleTier
