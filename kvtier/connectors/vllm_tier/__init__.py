"""A tier behind vLLM's own CPU tier, for engines that keep vLLM's ``OffloadingConnector``.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvtierOffloadingConnector",
        "kv_connector_module_path": "kvtier.connectors.vllm_tier", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 17179869184, "block_size": 64,
            "secondary_tiers": [{"type": "KvtierTier",
                "module_path": "kvtier.connectors.vllm_tier"}]}}'

Theory
------
vLLM copies between its GPUs and a CPU tier of its own, which is divided into chunks, and asks a
secondary tier for single chunks by name. This happens in the scheduler process, where a tier must
not wait: names are collected during a step, looked up at its end on a thread, and answered in a
later step. Bytes are copied between vLLM's memory and the arena, on threads as well.

vLLM's own connector does not tell a tier which model its chunks belong to. Its subclass
``KvtierOffloadingConnector`` does.

Rules
-----
* Nothing here raises into vLLM, and no hook waits for the daemon except a drain, which is bounded.
* Once a job is reported, nothing accesses vLLM's memory for it.
* Only ``connector`` and ``tier`` import vLLM.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.connectors.vllm_tier.connector import KvtierOffloadingConnector
    from kvtier.connectors.vllm_tier.tier import KvtierTier

__all__ = ["KvtierOffloadingConnector", "KvtierTier"]


def __getattr__(name: str) -> object:
    """Import the class on first use: it needs vLLM, other modules of this package do not.

    If the import fails for any reason, vLLM gets a class that serves nothing.
    """
    if name not in __all__:
        raise AttributeError(name)
    try:
        from kvtier.connectors.vllm_common.release import check_release

        check_release()
        if name == "KvtierTier":
            from kvtier.connectors.vllm_tier.tier import KvtierTier

            return KvtierTier
        from kvtier.connectors.vllm_tier.connector import KvtierOffloadingConnector
    except Exception as error:
        from kvtier.connectors.vllm_common.idle import (
            idle_offloading_connector,
            idle_tier,
            reason_of,
        )

        reason = reason_of(error)
        return idle_tier(reason) if name == "KvtierTier" else idle_offloading_connector(reason)
    return KvtierOffloadingConnector
