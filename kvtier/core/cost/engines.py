"""The engines that report their steps, each with a model of its own.

Engines of one key space have the same model, as a rule on the same kind of device. Yet one that is
throttled, or that says milliseconds where it means seconds, must not decide for the others: each is
planned for by what it reported itself, and only begins with what is known of its kind.
"""

from collections.abc import Mapping
from typing import Any

from kvtier.core.cost.fit import table
from kvtier.core.cost.recompute import EngineCost
from kvtier.core.limits import SESSIONS_MAX

__all__ = ["EngineCosts"]


class EngineCosts:
    """Models by key space and session; those that reported last are kept."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, str], EngineCost] = {}
        """The one that reported last is last."""

    def find(self, key_space: bytes, session: str = "") -> EngineCost | None:
        """Return the model of a session, or of its kind where it said nothing yet."""
        return self._known.get((key_space, session)) or self.latest(key_space)

    def latest(self, key_space: bytes | None = None) -> EngineCost | None:
        """Return the model of the session of a key space, or of any, that reported last."""
        for (other, _), engine in reversed(self._known.items()):
            if key_space in (None, other):
                return engine
        return None

    def reporting(self, key_space: bytes, session: str) -> EngineCost:
        """Return the model of a session that reports now: a new one begins as its kind is."""
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
        """Return what is known of each key space, by the session that reported last."""
        kinds: dict[bytes, EngineCost] = {}
        for (key_space, _), engine in self._known.items():
            kinds.pop(key_space, None)
            kinds[key_space] = engine
        return {key_space.hex(): engine.document() for key_space, engine in kinds.items()}

    def recall(self, document: Mapping[str, Any]) -> None:
        """Begin with what an earlier run learned; raises ValueError where it is not such."""
        for key, part in list(document.items())[-SESSIONS_MAX:]:
            engine = self._known[bytes.fromhex(key), ""] = EngineCost()
            engine.recall(table({key: part}, key))
