"""kvtier's events as lines in vLLM's log.

vLLM sets up its own logger and no other: without this our warnings would come as bare sentences
without their fields, and all else not at all. With it our lines go where vLLM's go, in vLLM's form
and from vLLM's level on. Whoever has set up the logger ``kvtier`` himself is left alone.
"""

import logging
from copy import copy
from typing import Any

from kvtier.observe.log_output import line_of
from kvtier.observe.trace import TRACES

__all__ = ["join_log", "join_traces"]


class _Passage(logging.Handler):
    """Hands events on to a logger, which writes them as it writes its own."""

    def __init__(self, target: logging.Logger) -> None:
        super().__init__()
        self._target = target

    def emit(self, record: logging.LogRecord) -> None:
        passed = copy(record)
        passed.msg, passed.args = f"kvtier: {line_of(record)}", None
        self._target.handle(passed)


def join_log(name: str = "kvtier", target: str = "vllm") -> None:
    """Have what is logged under ``name`` written by ``target``. Idempotent."""
    ours, theirs = logging.getLogger(name), logging.getLogger(target)
    if ours.handlers:
        return
    ours.addHandler(_Passage(theirs))
    ours.propagate = False
    if ours.level == logging.NOTSET:
        ours.setLevel(theirs.getEffectiveLevel())


def join_traces(vllm_config: Any) -> None:
    """Have this process's steps traced by what vLLM has set up in it, if it has. Idempotent."""
    if vllm_config.observability_config.otlp_traces_endpoint:
        from opentelemetry.trace import get_tracer

        TRACES.start(get_tracer("kvtier"))
