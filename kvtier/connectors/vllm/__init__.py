"""The connector for vLLM: a scheduler half and a worker half over ``kvtier.client``.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier.connectors.vllm", "kv_role": "kv_both"}'

Theory
------
vLLM makes one connector in the process that schedules and one in each that computes. The scheduler
half hashes prompts, asks the daemon, holds what it found in the arena under a lease, and only then
names it a hit; the worker halves copy between vLLM's tensors and the arena, on threads of their
own. What a worker knows of the bytes, it tells the scheduler half once, in vLLM's own handshake.
Which weights they come from, the scheduler half reads from their files on a thread, and tells the
workers with its first orders: a hundred gigabytes take minutes, and vLLM serves meanwhile.

Rules
-----
* Nothing here raises into vLLM, and no call from its step waits for the daemon.
* Blocks are bytes. How they are arranged is declared, and part of their identity.
* Only ``connector``, ``idle``, ``messages``, ``metrics``, ``plugin``, ``release``,
  ``identity.description`` and ``routers.events`` import vLLM.

Where to begin: ``connector`` has the hooks, ``scheduler`` and ``worker`` the halves, ``order`` what
they say to each other; ``start``, ``refusal`` and ``site`` what comes before. A request is
``tracked``; ``searches``, ``loads`` and ``stores`` are what is under way for it, in this order.
Packages: ``identity``, ``transfer``, ``routers``.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.connectors.vllm.connector import KvtierConnector

__all__ = ["KvtierConnector"]


def __getattr__(name: str) -> object:
    """Import the connector on first use: it needs vLLM, and the modules beside it do not.

    If it cannot be imported for any reason, vLLM gets a connector that serves nothing.
    """
    if name != "KvtierConnector":
        raise AttributeError(name)
    try:
        from kvtier.connectors.vllm_common.release import check_release

        check_release()
        from kvtier.connectors.vllm.connector import KvtierConnector
    except Exception as error:
        from kvtier.connectors.vllm.idle import idle_connector
        from kvtier.connectors.vllm_common.unserved import reason_of

        return idle_connector(reason_of(error))
    return KvtierConnector
