"""What the parts of a replay with time share: its trace, its machine, its node, and its clock."""

from collections.abc import Callable
from dataclasses import dataclass

from kvtier.node import action as ac
from kvtier.node import event as ev
from kvtier.sim.replay.agenda import Agenda, Pipe
from kvtier.sim.replay.desk import Desk
from kvtier.sim.replay.machine import Machine, ReplayLink
from kvtier.sim.replay.trace import Trace

__all__ = ["Scene", "SlowCarrier"]


@dataclass(frozen=True, slots=True)
class Scene:
    """The desk's clock is that of the agenda."""

    trace: Trace
    machine: Machine
    agenda: Agenda
    desk: Desk

    @property
    def now_ns(self) -> int:
        """Return the time."""
        return self.agenda.now_ns

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something in a while."""
        self.agenda.at(self.agenda.now_ns + round(seconds * 1e9), action)

    def tick_at(self, at_ns: int, is_over: Callable[[], bool]) -> None:
        """Tell the node the time once a deadline of its has come, unless that is over."""

        def tick() -> None:
            if not is_over():
                self.desk.post(ev.Tick())

        self.agenda.at(at_ns, tick)


class SlowCarrier:
    """A ``Carrier`` of a tier with one way, on which reads and writes take turns."""

    def __init__(self, agenda: Agenda, link: ReplayLink) -> None:
        self._agenda = agenda
        self._link = link
        self._pipe = Pipe(link.latency_s)

    def carry(self, work: ac.Read | ac.Write, desk: Desk) -> None:
        """Let the transfer take effect once its bytes have gone their way."""
        num_bytes = sum(block.header.payload_bytes for block in work.blocks)
        is_read = isinstance(work, ac.Read)
        rate = self._link.read_bytes_per_s if is_read else self._link.write_bytes_per_s
        began_ns = self._agenda.now_ns
        done_ns = self._pipe.carry_ns(began_ns, num_bytes / rate)
        ended: list[bool] = []

        def finish() -> None:
            ended.append(True)
            desk.finish(work, (self._agenda.now_ns - began_ns) / 1e9)

        self._agenda.at(done_ns, finish)
        if done_ns > work.deadline_ns:
            self._agenda.at(work.deadline_ns, lambda: None if ended else desk.post(ev.Tick()))
