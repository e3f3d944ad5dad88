"""The vLLM plugin that registers the connector's name; vLLM runs it in each of its processes.

It names the connector's module without importing it, so it costs nothing if vLLM uses another
connector or none.
"""

from kvtier.observe.log import Log

__all__ = ["register"]

_NAME = "KvtierConnector"
_MODULE = "kvtier.connectors.vllm"


def register() -> None:
    """Register the connector. Idempotent; never raises, since vLLM must start without it too."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        KVConnectorFactory.register_connector(_NAME, _MODULE, _NAME)
    except ValueError:
        return  # already registered: vLLM may call this more than once
    except Exception as error:  # other releases of vLLM may lack anything
        remedy = "set kv_connector_module_path to kvtier.connectors.vllm"
        Log("kvtier.vllm").warning(
            "cannot register KvtierConnector with vLLM", error=error, remedy=remedy
        )
