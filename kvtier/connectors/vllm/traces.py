"""Spans of ours among vLLM's own, where it traces: what a lookup, a load and a store took."""

from typing import Any

from kvtier.observe.trace import TRACES

__all__ = ["join_traces"]


def join_traces(vllm_config: Any) -> None:
    """Have this process's steps traced by what vLLM has set up in it, if it has. Idempotent."""
    if vllm_config.observability_config.otlp_traces_endpoint:
        from opentelemetry.trace import get_tracer

        TRACES.start(get_tracer("kvtier"))
