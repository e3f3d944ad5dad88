"""Why kvtier serves nothing here: an unsupported release of vLLM, or a broken installation.

Imports as little as possible, because any other import may be the broken one.
"""

from kvtier.connectors.vllm_common.observability import join_log
from kvtier.observe.log import Log

__all__ = ["UnservedRelease", "reason_of", "say_idle"]


class UnservedRelease(ImportError):
    """Raised for a vLLM release that kvtier does not support; the message has the remedy."""


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
