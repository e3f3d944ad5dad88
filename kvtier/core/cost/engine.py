"""Models how long an engine takes to compute a prompt beside its other work.

Theory
------
A step that computes ``n`` prompt tokens takes ``max(floor, base + n * per_token) + attended *
per_attended``. Reading the weights takes the floor, however few tokens there are; an engine with
slow steps has a base on top. Decoding sequences are part of every step. Their share is fitted to
steps that only decode, and subtracted before the rest is fitted, so a full batch does not look like
slow prefill.

A prompt is computed in chunks, after the tokens of earlier requests.

Engines of one key space have the same model, and usually the same kind of device. Yet one that is
throttled, or reports milliseconds as seconds, must not affect the others: plans for an engine use
its own reports, and the model of its key space only as a start.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.core.cost.fit import SECONDS_MAX, Fit, Rate, is_amount, table
from kvtier.core.limits import SESSIONS_MAX
from kvtier.core.plan import EngineLoad, ModelFlops, StepSample

__all__ = ["EngineCost", "EngineCosts", "EngineSpeed"]

_GUESS = (1e-3, 67e-6, 67e-6 / 30_000)
"""Base, per token and per squared token: an 8B model on a data-centre GPU. Faster than most, so
that nothing is restored on a mere guess where computing might be faster."""

_FLOOR_GUESS_S = 0.01
"""Time to read the weights of such a model."""

_SETTLED_STEPS = 8
"""Number of prefill steps after which a single slow step hardly changes the fit."""

_FIRST_TAIL = 2.0
_CHUNK_GUESS = 512
_WAITING_MAX = 10**8
_RUNNING_MAX = 10**5
"""Larger values in an engine's reports are capped at these."""


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """An engine's speed under one load, computed once for many predictions."""

    floor_s: float
    base_s: float
    token_s: float
    attended_s: float
    decode_s: float
    """Time that decoding sequences add to each step."""
    chunk: int
    lag: float
    """Ratio of a whole prompt's time to the sum of its steps; included in the other values."""
    tail: float
    """Ratio of P95 to mean, for one step."""
    tail_whole: float
    """Lower bound of that ratio for whole prompts."""

    @property
    def knee_tokens(self) -> float:
        """Return the number of tokens up to which a step takes the floor."""
        return max((self.floor_s - self.base_s) / self.token_s, 0.0)

    def tail_of(self, seconds: float) -> float:
        """Return the ratio of P95 to mean for a duration: the noise of many steps averages out."""
        num_steps = max(seconds / (self._step_s(self.chunk) + self.decode_s), 1.0)
        return float(max(1.0 + (self.tail - 1.0) / num_steps**0.5, self.tail_whole))

    def steps_s(self, num_tokens: float) -> float:
        """Return the time of prompt tokens in full chunks, without the share of attention."""
        if num_tokens <= 0:
            return 0.0
        full, rest = divmod(num_tokens, self.chunk)
        seconds = full * (self._step_s(self.chunk) + self.decode_s)
        return seconds + (self._step_s(rest) + self.decode_s if rest > 0 else 0.0)

    def compute_s(self, first: float, end: float) -> float:
        """Return the time to compute the tokens from ``first`` to ``end``."""
        if end <= first:
            return 0.0
        attended = (end - first) * (end + first) / 2
        return self.steps_s(end - first) + attended * self.attended_s

    def _step_s(self, num_tokens: float) -> float:
        return max(self.floor_s, self.base_s + num_tokens * self.token_s)


class EngineCost:
    """The step model of one engine: one model on one device."""

    def __init__(self) -> None:
        base_s, token_s, attended_s = _GUESS
        self._prefill = Fit(
            (
                Rate(base_s, 0.0, 10.0),
                Rate(token_s, 1e-9, 1.0),
                Rate(attended_s, 0.0, 1e-3),
            ),
            _FIRST_TAIL,
        )
        self._decode = Fit(
            (
                Rate(_FLOOR_GUESS_S, 0.0, 10.0),
                Rate(1e-5, 0.0, 1.0),
                Rate(1e-9, 0.0, 1e-3),
            ),
            _FIRST_TAIL,
        )
        # The time between steps, and other requests that are scheduled in between.
        self._whole = Fit((Rate(1.0, 0.8, 2.0),), 1.0)
        self._is_recalled = False
        self._small_s: float | None = None
        """Recent duration of steps with few prompt tokens: the floor if no step only decodes."""
        self._past_per_sequence = 512.0
        self._attended_per_token = 512.0
        self._chunks: deque[int] = deque(maxlen=32)
        self._idle_speed: EngineSpeed | None = None
        """Cached until something new is learned: it is needed for each run of blocks touched."""

    @property
    def is_known(self) -> bool:
        """Return whether the engine was ever measured, in this run or an earlier one."""
        return self.is_measured or self._is_recalled

    @property
    def is_settled(self) -> bool:
        """Return whether the model rests on more than the first steps, which are often slow."""
        return self._is_recalled or self._prefill.num_noted >= _SETTLED_STEPS

    @property
    def is_measured(self) -> bool:
        """Return whether a prefill step was measured."""
        return self._prefill.num_noted > 0

    def note_flops(self, flops: ModelFlops) -> None:
        """Derive the initial guess from the model's operations, if the device's speed is known."""
        amounts = (flops.per_token, flops.per_attended, flops.per_s)
        self._idle_speed = None
        if self.is_known or not all(map(is_amount, amounts)):
            return
        if flops.per_s < 1e6 or flops.per_token < 1.0:
            return
        token_s = min(max(flops.per_token / flops.per_s, 1e-9), 1.0)
        attended_s = min(flops.per_attended / flops.per_s, 1e-3)
        self._prefill.guess((0.0, token_s, attended_s))

    def note(self, step: StepSample, now_ns: int) -> bool:
        """Learn from a step; returns False if it is invalid."""
        self._idle_speed = None
        new, decoding = step.num_prefill_tokens, step.num_decode_tokens
        amounts = (new, decoding, step.attended, step.decode_past_tokens)
        if not all(map(is_amount, amounts)) or new > _WAITING_MAX or decoding > _RUNNING_MAX:
            return False
        if decoding:
            self._past_per_sequence += 0.1 * (
                min(step.decode_past_tokens / decoding, 1e7) - self._past_per_sequence
            )
        decode_terms = (1.0, decoding, step.decode_past_tokens)
        if not new:
            return bool(decoding) and self._decode.note(decode_terms, step.seconds, now_ns)
        decode_s = self._decode.mean_s(decode_terms) - self._decode.mean_s((1.0, 0, 0))
        # Whatever the error, most of a prefill step belongs to the prompt.
        seconds = max(step.seconds - decode_s, 0.25 * step.seconds) if decoding else step.seconds
        if self._is_floor(new, seconds):  # it says nothing about the time per token
            self._note_small(seconds)
            return True
        if not self._prefill.note((1.0, new, step.attended), seconds, now_ns):
            return False
        self._attended_per_token += 0.1 * (min(step.attended / new, 1e8) - self._attended_per_token)
        self._chunks.append(new + decoding)
        if new <= 16:
            self._note_small(seconds)
        return True

    def _is_floor(self, num_tokens: int, seconds: float) -> bool:
        """Return whether a step only took the floor, as far as is known."""
        floor_s = self._floor_s()
        base_s, token_s, _ = self._prefill.rates
        is_below = (
            self._prefill.num_noted >= _SETTLED_STEPS and base_s + num_tokens * token_s < floor_s
        )
        return is_below and 0.7 * floor_s < seconds < 1.3 * floor_s

    def _note_small(self, seconds: float) -> None:
        self._small_s = seconds if self._small_s is None else _nearer(self._small_s, seconds)

    def note_whole(self, predicted_s: float, seconds: float, now_ns: int) -> None:
        """Learn from a request that restored nothing, and the prediction for its steps."""
        self._idle_speed = None
        self._whole.note((predicted_s,), seconds, now_ns)

    def speed(self, load: EngineLoad) -> EngineSpeed:
        """Return the engine's speed while this many sequences decode."""
        running = _bounded(load.num_running, _RUNNING_MAX)
        base_s, token_s, attended_s = self._prefill.rates
        lag = self._whole.rates[0]
        past = running * self._past_per_sequence
        decode_s = self._decode.mean_s((1.0, running, past)) - self._decode.mean_s((1.0, 0, 0))
        return EngineSpeed(
            floor_s=self._floor_s() * lag,
            base_s=base_s * lag,
            token_s=token_s * lag,
            attended_s=attended_s * lag,
            decode_s=max(decode_s, 0.0) * lag if running else 0.0,
            chunk=max(self._chunk() - running, 16),
            lag=lag,
            tail=self._prefill.tail,
            tail_whole=self._whole.tail,
        )

    def wait_s(self, load: EngineLoad, speed: EngineSpeed) -> float:
        """Return the time until the waiting tokens are computed."""
        waiting = _bounded(load.waiting_tokens, _WAITING_MAX)
        attended_s = waiting * self._attended_per_token * speed.attended_s
        return min(speed.steps_s(waiting) + attended_s, SECONDS_MAX)

    def saved_s(self, end_tokens: int, num_tokens: int) -> float:
        """Return the seconds saved by not computing the ``num_tokens`` before ``end_tokens``."""
        speed = self._idle_speed = self._idle_speed or self.speed(EngineLoad())
        first = max(end_tokens - num_tokens, 0)
        attended = max(end_tokens - first, 0) * (end_tokens + first) / 2
        share = speed.steps_s(speed.chunk) / speed.chunk
        return min(max(end_tokens - first, 0) * share + attended * speed.attended_s, SECONDS_MAX)

    def _floor_s(self) -> float:
        """Return the minimum duration of a step, as far as is known."""
        if self._decode.num_noted:
            return self._decode.mean_s((1.0, 1.0, self._past_per_sequence))
        if self._small_s is not None:
            return self._small_s
        base_s, token_s, _ = self._prefill.rates
        return min(_FLOOR_GUESS_S, base_s + 64 * token_s)

    def _chunk(self) -> int:
        """Return the tokens of a full step: a maximum that several steps reached."""
        if not self._chunks:
            return _CHUNK_GUESS
        most = max(self._chunks)
        return most if self._chunks.count(most) >= 3 else max(most, _CHUNK_GUESS)

    def document(self) -> dict[str, Any]:
        """Return the learned state and the resulting speed."""
        return {
            "prefill": self._prefill.document(),
            "decode": self._decode.document(),
            "floor_s": self._floor_s(),
            "chunk_tokens": self._chunk(),
            "tokens_per_s": 4096 / max(self.saved_s(4096, 4096), 1e-9),
        }

    def recall(self, document: Mapping[str, Any]) -> None:
        """Restore the learned state of an earlier run; raises ValueError if it is invalid."""
        self._idle_speed = None
        self._prefill.recall(table(document, "prefill"))
        self._decode.recall(table(document, "decode"))
        self._is_recalled = True


def _bounded(value: float, most: int) -> int:
    """Return a count that a client reported, within the possible bounds."""
    return int(min(value, most)) if value > 0 else 0


def _nearer(before: float, now: float) -> float:
    """Return a running level; an outlier moves it by at most a fifth."""
    return before + 0.2 * (min(max(now, before / 2), before * 2) - before)


class EngineCosts:
    """Models by key space and session; those that reported most recently are kept."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, str], EngineCost] = {}
        """Ordered by the last report."""

    def find(self, key_space: bytes, session: str = "") -> EngineCost | None:
        """Return the model of a session, or of its key space if it has not reported yet."""
        return self._known.get((key_space, session)) or self.latest(key_space)

    def latest(self, key_space: bytes | None = None) -> EngineCost | None:
        """Return the model of the session that reported last, of a key space or of all."""
        for (other, _), engine in reversed(self._known.items()):
            if key_space in (None, other):
                return engine
        return None

    def reporting(self, key_space: bytes, session: str) -> EngineCost:
        """Return the model of a reporting session; a new one starts as that of its key space."""
        engine = self._known.pop((key_space, session), None)
        if engine is None:
            engine, kind = EngineCost(), self.latest(key_space)
            if kind is not None and kind.is_known:
                engine.recall(kind.document())
        self._known[key_space, session] = engine
        if len(self._known) > SESSIONS_MAX:
            del self._known[next(iter(self._known))]
        return engine

    def document(self) -> dict[str, Any]:
        """Return the model of each key space, from the session that reported last."""
        kinds: dict[bytes, EngineCost] = {}
        for (key_space, _), engine in self._known.items():
            kinds.pop(key_space, None)
            kinds[key_space] = engine
        return {key_space.hex(): engine.document() for key_space, engine in kinds.items()}

    def recall(self, document: Mapping[str, Any]) -> None:
        """Restore the learned state of an earlier run; raises ValueError if it is invalid."""
        for key, part in list(document.items())[-SESSIONS_MAX:]:
            engine = self._known[bytes.fromhex(key), ""] = EngineCost()
            engine.recall(table({key: part}, key))
