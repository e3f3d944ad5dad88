"""The connector for vLLM: a scheduler half and a worker half over ``kvtier.client``.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier.connectors.vllm", "kv_role": "kv_both"}'

Theory
------
vLLM creates one connector in its scheduler process and one in each worker process. The scheduler
half hashes prompts, queries the daemon, leases the found blocks in the arena, and only then reports
a hit. The worker halves copy between vLLM's tensors and the arena, on threads of their own. A
worker describes its blocks to the scheduler half once, in vLLM's handshake. The scheduler half
fingerprints the weights from their files on a thread and sends the result to the workers with its
first jobs: reading a hundred gigabytes takes minutes, and vLLM serves meanwhile.

Rules
-----
* Nothing here raises into vLLM, and no call from its step waits for the daemon.
* Blocks are bytes. Their layout is declared, and part of their identity.
* Only ``connector``, ``kv_events``, ``messages``, ``plugin``, ``setup`` and ``vllm_common.release``
  import vLLM.

Start reading in ``connector``, which has the hooks. ``scheduler`` and ``worker`` are the halves and
``jobs`` is what they exchange; ``setup`` and ``block_identity`` come before. A request is a
``TrackedRequest``; ``open_lookups`` and ``open_transfers`` track what is running for it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.connectors.vllm.connector import KvtierConnector

__all__ = ["KvtierConnector"]


def __getattr__(name: str) -> object:
    """Import the connector on first use: it needs vLLM, other modules of this package do not.

    If the import fails for any reason, vLLM gets a connector that serves nothing.
    """
    if name != "KvtierConnector":
        raise AttributeError(name)
    try:
        from kvtier.connectors.vllm_common.release import check_release

        check_release()
        from kvtier.connectors.vllm.connector import KvtierConnector
    except Exception as error:
        from kvtier.connectors.vllm_common.idle import idle_connector, reason_of

        return idle_connector(reason_of(error))
    return KvtierConnector
