"""kvtier's events in vLLM's log, and kvtier's spans in vLLM's traces.

vLLM configures only its own logger. Without this, kvtier's warnings would appear without their
fields, and its other events not at all. With it, events go to vLLM's log, in vLLM's format and at
vLLM's level. If a user has configured the logger ``kvtier``, it is left unchanged.
"""

import logging
from copy import copy
from typing import Any

from kvtier.observe.log_output import line_of
from kvtier.observe.trace import TRACES

__all__ = ["join_log", "join_traces"]


class _Passage(logging.Handler):
    """Forwards events to a logger, which writes them like its own."""

    def __init__(self, target: logging.Logger) -> None:
        super().__init__()
        self._target = target

    def emit(self, record: logging.LogRecord) -> None:
        passed = copy(record)
        passed.msg, passed.args = f"kvtier: {line_of(record)}", None
        self._target.handle(passed)


def join_log(name: str = "kvtier", target: str = "vllm") -> None:
    """Make ``target`` write what is logged under ``name``. Idempotent."""
    ours, theirs = logging.getLogger(name), logging.getLogger(target)
    if ours.handlers:
        return
    ours.addHandler(_Passage(theirs))
    ours.propagate = False
    if ours.level == logging.NOTSET:
        ours.setLevel(theirs.getEffectiveLevel())


def join_traces(vllm_config: Any) -> None:
    """Trace this process's steps with vLLM's tracer, if vLLM traces. Idempotent."""
    if vllm_config.observability_config.otlp_traces_endpoint:
        from opentelemetry.trace import get_tracer

        TRACES.start(get_tracer("kvtier"))
