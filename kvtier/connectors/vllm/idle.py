"""A connector that serves nothing, used if the real one cannot be imported.

An unsupported release of vLLM or a broken dependency must not keep vLLM from starting: vLLM gets
this class, computes everything itself, and its log has one line with the reason. This module
imports as little as possible, because any other import may be the broken one.
"""

import abc
from functools import cache
from typing import Any

from kvtier.connectors.vllm_common.unserved import say_idle

__all__ = ["idle_connector"]


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
