"""The result of ``kvtier plan`` as text, as JSON, and as an initial configuration."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.cli.formatting import format_bytes, format_count, wrap_lines
from kvtier.config import load_config
from kvtier.config.units import format_size
from kvtier.sim.replay.prefill import Dimensions
from kvtier.sim.replay.setup import Machine, ReplayLink
from kvtier.sim.replay.sizing import Point, Sizes, break_even_bytes_per_s, knee
from kvtier.sim.replay.trace import Trace

__all__ = ["POLICY", "SizingPlan"]

_MIB, _GIB = 2**20, 2**30

POLICY = "rd-sec"
"""Eviction policy of the replays and of the configuration."""


@dataclass(frozen=True, slots=True)
class SizingPlan:
    """Tier sizes, computed from replays over a sweep of sizes."""

    dimensions: Dimensions
    machine: Machine
    trace: Trace
    block_bytes: int
    speed: str
    """Machine whose speed was assumed."""

    curve: Sequence[Point]
    sizes: Sizes

    def lines(self) -> Iterator[str]:
        """Yield the plan as text, 80 columns wide."""
        model, layout = self.dimensions, self.dimensions.layout(self.trace.block_tokens)
        yield (
            f"model    {model.name}: {model.num_layers} layers, {model.num_kv_heads} KV heads of "
            f"{model.head_dim}, {model.dtype}"
        )
        yield (
            f"         {format_bytes(model.token_bytes)} per token, "
            f"{format_bytes(layout.block_bytes)} per block of {layout.block_tokens} tokens"
        )
        if model.dtype in {"bfloat16", "float16"}:
            yield "         (engines on a CPU use float32: --dtype float32)"
        yield f"speed    {self.speed}"
        yield (
            f"traffic  {self.trace.name}: {format_count(len(self.trace.requests))} requests, "
            f"{format_count(self._session_tokens())} tokens each"
        )
        for note in self.trace.notes:
            yield from wrap_lines(f"note: {note}")
        yield ""
        yield from self._break_even()
        yield ""
        yield from self._curve()
        yield ""
        yield from self._tiers()

    def _break_even(self) -> Iterator[str]:
        needed = break_even_bytes_per_s(self.machine)
        rate = 1 / self.machine.prefill.token_s
        yield (
            f"break-even: computing {format_count(rate)} tokens/s is as fast as restoring at "
            f"{format_bytes(needed)}/s"
        )
        for name, link in self._links():
            ratio = link.read_bytes_per_s / needed
            verdict = "restoring is faster" if ratio > 1 else "recomputing is faster"
            yield f"  {name}  {format_bytes(link.read_bytes_per_s):>9}/s  {ratio:>5.1f}x  {verdict}"

    def _curve(self) -> Iterator[str]:
        knee_point = knee(self.curve)
        yield "      size     blocks    tokens   hits  seconds  optimal"
        for point in self.curve:
            size = format_bytes(point.num_blocks * self.block_bytes)
            mark = "  <- knee of the curve" if point is knee_point else ""
            yield (
                f"{size:>10}{point.num_blocks:>11,}"
                f"{self._tokens(point.num_blocks):>10}{point.hit_ratio:>7.3f}"
                f"{point.saved_share:>9.3f}{point.best_ratio:>8.3f}{mark}"
            )

    def _tiers(self) -> Iterator[str]:
        expected, session = self.sizes.expected, max(1.0, self._session_tokens())
        yield "tier       capacity    tokens   sessions"
        for name, blocks in (("cpu", self.sizes.cpu_blocks), ("ssd", self.sizes.ssd_blocks)):
            tokens = blocks * self.trace.block_tokens
            yield (
                f"{name:<8}{format_bytes(blocks * self.block_bytes):>11}{self._tokens(blocks):>10}"
                f"{format_count(tokens / session):>11}"
            )
        yield (
            f"expected: {expected.hit_ratio:.1%} of prompt tokens from tiers, "
            f"{expected.saved_share:.1%} of compute time saved"
        )
        if not self.sizes.is_reached:
            best = self.curve[-1]
            yield (
                f"the target cannot be reached: hit ratio {best.hit_ratio:.1%} with the largest "
                f"size, {best.best_ratio:.1%} with perfect foresight"
            )

    def document(self) -> dict[str, Any]:
        """Return the plan as a JSON document."""
        return {
            "model": {
                "name": self.dimensions.name,
                "token_bytes": self.dimensions.token_bytes,
                "block_bytes": self.block_bytes,
                "block_tokens": self.trace.block_tokens,
            },
            "traffic": {
                "name": self.trace.name,
                "requests": len(self.trace.requests),
                "tokens_per_request": round(self._session_tokens(), 1),
                "notes": list(self.trace.notes),
            },
            "break_even_bytes_per_s": round(break_even_bytes_per_s(self.machine)),
            "links_bytes_per_s": {name: link.read_bytes_per_s for name, link in self._links()},
            "curve": [
                {
                    "blocks": point.num_blocks,
                    "bytes": point.num_blocks * self.block_bytes,
                    "hit_ratio": round(point.hit_ratio, 5),
                    "saved_share": round(point.saved_share, 5),
                    "best_ratio": round(point.best_ratio, 5),
                }
                for point in self.curve
            ],
            "bend_blocks": knee(self.curve).num_blocks,
            "cpu_blocks": self.sizes.cpu_blocks,
            "ssd_blocks": self.sizes.ssd_blocks,
            "reached": self.sizes.is_reached,
        }

    def config(self) -> str:
        """Return an initial configuration for ``kvtier serve``."""
        slab_bytes = max(64 * _MIB, self.block_bytes)
        # Stores in flight occupy a part of the arena: in a smaller one, not even one block fits.
        cpu_bytes = max(self.sizes.cpu_blocks, 8) * self.block_bytes
        cpu_bytes = math.ceil(cpu_bytes / slab_bytes) * slab_bytes
        ssd_bytes = self.sizes.ssd_blocks * (self.block_bytes + 4096)
        segment_bytes = max(256 * _MIB, -(-4 * self.block_bytes // _MIB) * _MIB)
        pays = self.machine.ssd.read_bytes_per_s > break_even_bytes_per_s(self.machine)
        values = {
            "cpu.capacity": format_size(cpu_bytes),
            "cpu.slab": format_size(slab_bytes),
            "ssd.enabled": "false" if not ssd_bytes or not pays else "true",
            "policy.eviction": POLICY,
            "engine.block_tokens": str(self.trace.block_tokens),
        }
        if values["ssd.enabled"] == "true":
            rounded = math.ceil(max(ssd_bytes, 2 * segment_bytes) / _GIB) * _GIB
            values["ssd.capacity"] = format_size(rounded)
            values["ssd.segment"] = format_size(segment_bytes)
        load_config(None, values, {})  # raises if the configuration is invalid
        return _toml(values)

    def _links(self) -> Iterator[tuple[str, ReplayLink]]:
        yield "cpu", self.machine.cpu
        yield "ssd", self.machine.ssd

    def _session_tokens(self) -> float:
        return self.trace.num_tokens / max(1, len(self.trace.requests))

    def _tokens(self, num_blocks: int) -> str:
        tokens = num_blocks * self.trace.block_tokens
        return f"{tokens / 1e6:.1f} M" if tokens >= 1e6 else f"{tokens:,}"


def _toml(values: Mapping[str, str]) -> str:
    lines: list[str] = []
    section = ""
    for key in sorted(values):
        here, name = key.split(".")
        if here != section:
            lines += ["", f"[{here}]"] if lines else [f"[{here}]"]
            section = here
        value = values[key]
        is_bare = value in {"true", "false"} or value.isdecimal()
        lines.append(f"{name} = {value}" if is_bare else f'{name} = "{value}"')
    return "\n".join(lines) + "\n"
