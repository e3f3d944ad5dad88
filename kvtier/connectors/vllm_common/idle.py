"""Classes that serve nothing, used if the real ones cannot be imported.

An unsupported release of vLLM or a broken dependency must not keep vLLM from starting: vLLM gets
one of these classes and computes everything itself, or uses its own CPU tier alone. Its log gets
one line with the reason. This module imports as little as possible, because any other import may be
the broken one; vLLM is imported inside the functions.
"""

import abc
from collections.abc import Iterable
from functools import cache
from typing import Any

from kvtier.connectors.vllm_common.observability import join_log
from kvtier.observe.log import Log

__all__ = [
    "UnservedRelease",
    "idle_connector",
    "idle_offloading_connector",
    "idle_tier",
    "reason_of",
    "say_idle",
]


class UnservedRelease(ImportError):
    """An unsupported vLLM release; the message has the remedy."""


def reason_of(error: Exception) -> str:
    """Return why kvtier cannot be used, with the remedy."""
    if isinstance(error, UnservedRelease):
        return str(error)
    return (
        f"kvtier cannot be imported ({type(error).__name__}: {error}): reinstall it in vLLM's"
        " environment (pip install --force-reinstall kvtier), and check its dependencies with"
        " pip check"
    )


def say_idle(reason: str) -> None:
    """Log in one line that nothing is cached, and why."""
    join_log()
    Log("kvtier.vllm").error("vLLM's blocks are not cached", reason=reason)


@cache  # vLLM may ask for the class again, and compares classes
def idle_connector(reason: str) -> type:
    """Return a connector class that works with any vLLM release that has connectors."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    hybrid = getattr(base, "SupportsHMA", None)  # without it vLLM restricts hybrid models
    bases = (base.KVConnectorBase_V1, hybrid) if hybrid else (base.KVConnectorBase_V1,)

    class IdleConnector(*bases):  # type: ignore[misc]  # vLLM is not there to be checked
        """A connector that finds nothing and stores nothing."""

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
            given = () if kv_cache_config is None else (kv_cache_config,)
            super().__init__(vllm_config, role, *given)
            if role == base.KVConnectorRole.SCHEDULER:  # log it once, not in each worker
                say_idle(reason)

        @property
        def requires_kv_delivery(self) -> bool:
            return False

        def get_num_new_matched_tokens(self, *_: object, **__: object) -> tuple[int, bool]:
            return 0, False

        def build_connector_meta(self, *_: object, **__: object) -> Any:
            return base.KVConnectorMetadata()

        def request_finished(self, *_: object, **__: object) -> tuple[bool, None]:
            return False, None

        def request_finished_all_groups(self, *_: object, **__: object) -> tuple[bool, None]:
            return False, None

        def reset_cache(self) -> bool:
            return True  # vLLM treats anything else as an error

    for name in IdleConnector.__abstractmethods__:  # they differ between releases
        setattr(IdleConnector, name, _nothing)
    return abc.update_abstractmethods(IdleConnector)


def _nothing(_self: object, *_: object, **__: object) -> None:
    """Ignore all arguments and return None."""


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
