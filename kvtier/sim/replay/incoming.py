"""A load under way to a simulated engine: announced by the node, copied block by block."""

from collections.abc import Callable, Sequence

from kvtier.core.residency import TierName
from kvtier.node import action as ac
from kvtier.sim.replay.agenda import Pipe
from kvtier.sim.replay.scene import Scene

__all__ = ["Incoming"]


class Incoming:
    """Blocks in the order of their coming; ``ended`` is called once, when no more will come."""

    def __init__(self, scene: Scene, pipe: Pipe, ended: Callable[[], None]) -> None:
        self.lease = 0
        self.tiers: list[TierName] = []
        """Of the blocks that are in place."""
        self.is_over = False
        """The node announces no more."""
        self._scene = scene
        self._pipe = pipe
        self._ended = ended
        self._num_announced = 0
        self._is_given_up = False

    def announced(self, progress: ac.LoadUpdate) -> None:
        """Copy what the node says is there, and note an end."""
        self.lease = progress.lease
        self._num_announced += len(progress.tiers)
        self.is_over = bool(progress.end)
        if progress.tiers:
            self._copy(progress.tiers)
        elif self.is_over and self._is_complete:
            self._scene.after(0.0, self._end)

    def give_up(self) -> None:
        """Take nothing more in; ``ended`` is not called any more."""
        self._is_given_up = True

    @property
    def _is_complete(self) -> bool:
        return len(self.tiers) == self._num_announced

    def _copy(self, tiers: Sequence[TierName]) -> None:
        """Copy some blocks, as one step of the simulation: they were announced together."""
        link, now_ns = self._scene.machine.cpu, self._scene.now_ns
        num_bytes = len(tiers) * self._scene.desk.block_bytes
        done_ns = self._pipe.carry_ns(now_ns, num_bytes / link.read_bytes_per_s)

        def copied() -> None:
            if self._is_given_up:
                return
            self.tiers += tiers
            if self.is_over and self._is_complete:
                self._end()

        self._scene.agenda.at(done_ns, copied)

    def _end(self) -> None:
        if not self._is_given_up:
            self._is_given_up = True
            self._ended()
