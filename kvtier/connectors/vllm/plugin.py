"""Makes the connector known to vLLM by its name alone; vLLM calls it in each of its processes.

It names a module and imports nothing of it, so that it costs nothing where another connector is
used, or none.
"""

from kvtier.observe.log import Log

__all__ = ["register"]

_NAME = "KvtierConnector"
_MODULE = "kvtier.connectors.vllm"


def register() -> None:
    """Register the connector; once is enough. Never raises: a vLLM without it starts as well."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        KVConnectorFactory.register_connector(_NAME, _MODULE, _NAME)
    except ValueError:
        return  # it is registered: vLLM may call this more than once
    except Exception as error:  # of another vLLM, which may lack anything
        remedy = "set kv_connector_module_path to kvtier.connectors.vllm"
        Log("kvtier.vllm").warning(
            "cannot register KvtierConnector with vLLM", error=error, remedy=remedy
        )
