"""Synthetic traffic: sessions of several turns, and traffic added to traces to stress policies.

Each session begins with a prefix that all sessions share and a prompt of its own. Each turn sends
everything before it and something new, after a pause. When a session ends another begins, so the
number of active sessions stays about the same. The same description gives the same traffic.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from kvtier.core.identity import NO_TENANT
from kvtier.core.limits import CHAIN_BLOCKS_MAX
from kvtier.sim.replay.trace import Numbering, Trace, TraceRequest, in_order, numbered_keys

__all__ = ["Traffic", "with_cycle", "with_noise"]


_REQUESTS_MAX = 200_000
_BLOCKS_MAX = 2**24
"""Maximum size of described traffic: more takes hours and shows nothing new."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Describes traffic. Lengths are means of exponential draws, cut at four times the mean."""

    sessions: int
    """Number of active sessions."""
    prompt_tokens: int
    """Tokens of the first turn."""
    turn_tokens: int
    """Tokens that each later turn adds, with the answer before it."""
    turns: int = 5
    gap_s: float = 120.0
    shared_tokens: int = 0
    hours: float = 1.0
    block_tokens: int = 64
    seed: int = 0

    @property
    def name(self) -> str:
        """Return a short description."""
        return f"{self.sessions} sessions of {self.turns} turns"

    def trace(self) -> Trace:
        """Return the traffic as a trace."""
        draw = random.Random(self.seed)  # noqa: S311  # reproducible, not secret
        numbering = Numbering()
        requests: list[TraceRequest] = []
        notes: tuple[str, ...] = ()
        num_blocks = 0
        for place in range(self.sessions):
            for request in self._sessions(draw, numbering, place):
                requests.append(request)
                num_blocks += len(request.blocks)
                if len(requests) >= _REQUESTS_MAX or num_blocks >= _BLOCKS_MAX:
                    break
            else:
                continue
            notes = (f"traffic too large: only {place + 1:,} sessions are replayed",)
            break
        return Trace(self.name, self.block_tokens, in_order(requests), numbering.keys(), notes)

    def _sessions(
        self, draw: random.Random, numbering: Numbering, place: int
    ) -> Iterator[TraceRequest]:
        """Yield the requests of successive sessions in one place."""
        # In steady traffic the first session is already under way.
        at_s = -draw.random() * self.turns * self.gap_s
        count, most = 0, CHAIN_BLOCKS_MAX * self.block_tokens
        while at_s < self.hours * 3600:
            count += 1
            tokens = self.shared_tokens + self._length(draw, self.prompt_tokens)
            for _ in range(max(1, round(draw.expovariate(1 / self.turns)))):
                if 0 <= at_s < self.hours * 3600:
                    yield self._request(numbering, (place, count), min(tokens, most), at_s)
                tokens += self._length(draw, self.turn_tokens)
                at_s += draw.expovariate(1 / self.gap_s)

    def _request(
        self, numbering: Numbering, session: tuple[int, int], tokens: int, at_s: float
    ) -> TraceRequest:
        num_shared = self.shared_tokens // self.block_tokens
        num_blocks = tokens // self.block_tokens
        contents = [
            ("shared", block) if block < num_shared else (session, block)
            for block in range(num_blocks)
        ]
        blocks = numbering.number(NO_TENANT, contents)
        return TraceRequest(round(at_s * 1e9), blocks, tokens)

    @staticmethod
    def _length(draw: random.Random, mean: int) -> int:
        return min(4 * mean, 1 + round(draw.expovariate(1 / max(1, mean))))


def with_noise(trace: Trace) -> Trace:
    """Return the trace with a one-off prompt of the same length after each request."""
    requests: list[TraceRequest] = []
    next_number = trace.num_distinct
    for request in trace.requests:
        count = len(request.blocks)
        fresh = np.arange(next_number, next_number + count, dtype=np.int32)
        requests += [request, TraceRequest(request.at_ns, fresh, request.num_tokens)]
        next_number += count
    return _mixed(trace, "noise", requests, next_number)


def with_cycle(trace: Trace, num_documents: int, num_blocks: int) -> Trace:
    """Return the trace with a reader of documents in turn, one after every other request.

    Each document has ``num_blocks`` blocks of its own.
    """
    requests: list[TraceRequest] = []
    first = trace.num_distinct
    for number, request in enumerate(trace.requests):
        requests.append(request)
        if number % 2:
            start = first + (number // 2) % num_documents * num_blocks
            document = np.arange(start, start + num_blocks, dtype=np.int32)
            requests.append(TraceRequest(request.at_ns, document, num_blocks * trace.block_tokens))
    return _mixed(trace, "cycle", requests, first + num_documents * num_blocks)


def _mixed(trace: Trace, name: str, requests: list[TraceRequest], num_distinct: int) -> Trace:
    return replace(
        trace,
        name=f"{trace.name} with {name}",
        requests=in_order(requests),
        keys=numbered_keys(num_distinct),
    )
