"""Runs tier benchmarks at the start and for operators, so that the first decisions are sound.

Rules
-----
* A benchmark never delays requests: it runs on the tier's spare thread, one size at a time, and
  only while no reads wait. A tier that is always busy is not measured; its transfers are enough.
* A benchmark uses free space only, so it evicts no block. Nothing is written to a full tier, or one
  that is out or degraded, or beyond its write budget.
* A tier is not measured while it is being dropped: the benchmark's blocks would be counted.
* Results are valid for a week, and for the device they were measured on. They stay in use until the
  tier can be measured again.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from kvtier.core.plan import TransferSample
from kvtier.core.planner import Planner
from kvtier.core.residency import TierName
from kvtier.core.slow_tier import AdminState
from kvtier.daemon.tiers.benchmark import BLOCK_SIZES, TierBenchmark, depth_of, run_benchmark
from kvtier.errors import TierError, TierFull
from kvtier.observe.log import Log
from kvtier.runtime.driver import Driver
from kvtier.tiers.base import HealthState

__all__ = ["BenchmarkRunner"]

_log = Log("kvtier.daemon")

_WEEK_S = 7 * 86_400
"""Drives wear and networks change; 20 MiB a week cause no wear."""

_HELD = "it was being dropped"

_RETRY_S = 3600.0
"""Time between attempts to measure a tier."""

_STEP_LIMIT_NS = 4_000_000_000
"""Time limit for one size: health checks wait for the same thread, and must notice trouble within
seconds."""

_SLOW_S = 0.4
"""After a size that takes longer, no larger one is tried: the next is four times as large."""

_BUSY_LIMIT_S = 20.0
"""How long to wait for reads to end before this size and all larger ones are skipped."""

_YIELD_S = 0.01
"""Time between checks whether reads have ended."""

_HOLD_S = 3.0
"""How long a drop, which has a deadline of its own, waits for a benchmark to end."""

_ROUNDS_MAX = 64
"""Maximum number of rounds in a saved document; no benchmark writes more."""


@dataclass(frozen=True, slots=True)
class _Round:
    """Mean time of transfers of one size, direction and depth."""

    is_read: bool
    block_bytes: int
    num_blocks: int
    """Blocks in one transfer."""
    depth: int
    """Concurrent transfers."""
    seconds: float


@dataclass(frozen=True, slots=True)
class _Result:
    """Result of a benchmark, or why there is none."""

    device: str
    measured_s: int
    """Time of day in seconds; 0 if it was not measured."""
    rounds: tuple[_Round, ...]
    reason: str = ""
    """Why there are no rounds, or no more of them."""
    is_kept: bool = False
    """Whether the rounds are from an earlier benchmark, because of ``reason``."""


class BenchmarkRunner:
    """Measures the tiers of ``driver`` for ``planner``, one at a time.

    ``devices`` identifies the device of each tier, so that a new one is measured again.
    """

    def __init__(
        self,
        driver: Driver,
        planner: Planner,
        devices: Mapping[TierName, str],
        *,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._driver = driver
        self._planner = planner
        self._devices = dict(devices)
        self._now_s = now_s
        self._results: dict[TierName, _Result] = {}
        self._tried_s: dict[TierName, float] = {}
        self._lock = asyncio.Lock()
        self._num_holds = 0

    async def step(self) -> None:
        """Measure the tiers without a recent result."""
        for name in list(self._driver.tiers):
            if self._is_due(name) and self._takes_writes(name):
                async with self._lock:
                    self._results[name] = await self._measured(name)

    def renew(self, name: TierName, device: str) -> None:
        """Set the device of a tier that is about to be attached."""
        self._devices[name] = device
        self._tried_s.pop(name, None)

    async def probe(self, tiers: Sequence[TierName] = ()) -> dict[str, Any]:
        """Measure the named tiers now, or all slow ones; returns the results as JSON values."""
        names = tiers or tuple(self._driver.tiers)
        skipped = {}
        async with self._lock:
            for name in names:
                if name in self._driver.tiers:
                    self._results[name] = await self._measured(name)
                else:
                    skipped[name] = _Result("", 0, (), _why_none(name))
        return self._document({name: {**self._results, **skipped}[name] for name in names})

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Run no benchmark within the context; one in progress ends after the current size."""
        self._num_holds += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HOLD_S), self._lock:
                    pass  # no benchmark is running, and none will start
            yield
        finally:
            self._num_holds -= 1

    def document(self) -> dict[str, Any]:
        """Return all results, with the predictions of the cost model."""
        return self._document(self._results)

    def unmeasured(self) -> dict[str, str]:
        """Return by tier why the last benchmark failed."""
        return {
            name.value: result.reason
            for name, result in self._results.items()
            if result.reason and (result.is_kept or not result.rounds)
        }

    def recall(self, document: Mapping[str, Any]) -> None:
        """Restore the results of an earlier run; malformed ones are ignored.

        The planner restores its own state.
        """
        tiers = document.get("tiers")
        for name in self._driver.tiers:
            kept = tiers.get(name.value) if isinstance(tiers, Mapping) else None
            result = _recalled(kept)
            if result is not None:
                self._results[name] = result

    def _is_due(self, name: TierName) -> bool:
        result, now_s = self._results.get(name), self._now_s()
        tried_s = self._tried_s.get(name)
        if tried_s is not None and time.monotonic() - tried_s < _RETRY_S:
            return False
        if result is None or not result.measured_s or result.device != self._devices.get(name, ""):
            return True
        return not 0 <= now_s - result.measured_s < _WEEK_S

    async def _measured(self, name: TierName) -> _Result:
        """Measure as many sizes as possible; leaves no blocks in the tier."""
        earlier = self._results.get(name)
        if self._num_holds:
            return earlier or _Result("", 0, (), _HELD)
        self._tried_s[name] = time.monotonic()
        rounds: list[_Round] = []
        reason = self._obstacle(name)
        for block_bytes in BLOCK_SIZES:
            reason = reason or await self._round(name, block_bytes, rounds)
        is_cut = reason == _HELD
        if is_cut:
            del self._tried_s[name]  # retry soon
        said = "tier measured" if rounds else "tier not measured"
        _log.info(
            said,
            tier=name,
            sizes=len({each.block_bytes for each in rounds}),
            ended=reason or "complete",
        )
        device = self._devices.get(name, "")
        if not rounds and earlier and earlier.rounds and earlier.device == device:
            return replace(earlier, reason=reason, is_kept=True)
        measured_s = int(self._now_s()) if rounds and not is_cut else 0
        return _Result(device, measured_s, tuple(rounds), reason)

    async def _round(self, name: TierName, block_bytes: int, rounds: list[_Round]) -> str:
        """Measure one size; returns why no larger size is tried, or an empty text."""
        if not await self._is_quiet(name):
            return _HELD if self._num_holds else "it was busy with requests"
        executor = self._driver.executors.get(name)
        if executor is None or not self._takes_writes(name):
            return "an operator has stopped writes to it"
        try:
            measured = await executor.run_in_background(
                "benchmark", partial(run_benchmark, block_bytes), _STEP_LIMIT_NS
            )
        except TierFull as error:
            return str(error)
        except TierError as error:
            return f"measuring blocks of {block_bytes} bytes failed: {error}"
        return self._noted(name, measured, rounds)

    def _noted(self, name: TierName, measured: TierBenchmark, rounds: list[_Round]) -> str:
        now_ns = time.monotonic_ns()
        for is_read, samples in ((False, (measured.written,)), (True, measured.read)):
            for sample in samples:
                self._planner.note_transfer(name, is_read, sample, now_ns)
            rounds += _means(samples, is_read=is_read)
        is_slow = rounds[-1].seconds > _SLOW_S
        return "larger blocks would take too long" if is_slow else ""

    async def _is_quiet(self, name: TierName) -> bool:
        """Wait until a tier has no reads in flight; False if that takes too long."""
        until_s = time.monotonic() + _BUSY_LIMIT_S
        while self._driver.is_reading(name) and not self._num_holds:
            if time.monotonic() >= until_s:
                return False
            await asyncio.sleep(_YIELD_S)
        return not self._num_holds

    def _takes_writes(self, name: TierName) -> bool:
        lane = self._driver.node.transfers.lanes.get(name)
        return lane is not None and lane.admin_state is AdminState.ACTIVE

    def _obstacle(self, name: TierName) -> str:
        """Return why a tier must not be written to, or an empty text."""
        if not self._takes_writes(name):
            return "an operator has stopped writes to it"
        health = self._driver.executors[name].health()
        if health.state is not HealthState.UP:
            return f"it is {health.state}: {health.reason}"
        tier = self._driver.tiers[name]
        left_bytes = tier.usage().detail.get("write_budget_bytes")
        if left_bytes is None:
            return ""
        depth_max = tier.properties.num_workers
        needed_bytes = sum(size * depth_of(size, depth_max) for size in BLOCK_SIZES)
        if float(left_bytes) < needed_bytes:
            return f"its write budget has {left_bytes} bytes left, {needed_bytes} are needed"
        return ""

    def _document(self, results: Mapping[TierName, _Result]) -> dict[str, Any]:
        tiers = {}
        for name, result in results.items():
            rounds = [
                asdict(each) | {"model_s": self._model_s(name, each)} for each in result.rounds
            ]
            tiers[name.value] = asdict(result) | {"rounds": rounds}
        return {"tiers": tiers}

    def _model_s(self, name: TierName, each: _Round) -> float | None:
        """Return the predicted time of single reads; there is no prediction for other rounds."""
        if not each.is_read or each.depth > 1:
            return None
        return self._planner.restore_s(name, each.block_bytes)


def _means(samples: Sequence[TransferSample], *, is_read: bool) -> list[_Round]:
    """Return the mean of the transfers of each depth, lowest first."""
    rounds = []
    for depth in sorted({sample.depth for sample in samples}):
        alike = [sample for sample in samples if sample.depth == depth]
        num_blocks = alike[0].num_blocks
        block_bytes = alike[0].num_bytes // num_blocks
        seconds = sum(sample.seconds for sample in alike) / len(alike)
        rounds.append(_Round(is_read, block_bytes, num_blocks, depth, seconds))
    return rounds


def _why_none(name: TierName) -> str:
    if name in (TierName.GPU, TierName.CPU):
        return "it is measured by the engines' own loads"
    return "it is not configured"


def _recalled(kept: object) -> _Result | None:
    """Return a saved result; None if it is malformed."""
    if not isinstance(kept, Mapping):
        return None
    try:
        rounds = tuple(
            _Round(
                bool(each["is_read"]),
                int(each["block_bytes"]),
                int(each["num_blocks"]),
                int(each["depth"]),
                float(each["seconds"]),
            )
            for each in kept["rounds"][:_ROUNDS_MAX]
        )
        result = _Result(str(kept["device"]), int(kept["measured_s"]), rounds)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    is_sane = all(each.block_bytes > 0 and 0 < each.seconds < math.inf for each in rounds)
    return result if rounds and is_sane else None
