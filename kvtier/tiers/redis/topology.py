"""Topology: which server has which block, found out in the background.

One server is simply there. Behind Sentinels and in a cluster, servers change their roles: a *look*
asks who is who. Looks are made by one thread, never on a caller's time, once a caller has said that
something is wrong, and from time to time unasked; never more often than every ``_PAUSE_S``. Only
the first call waits for one, until its deadline.

A server that failed is left alone until a look finds that it answers again. So a dead node costs
the calls that found it out a timeout, and the others nothing.
"""

import contextlib
import itertools
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.client import Redis
from redis.cluster import parse_cluster_slots
from redis.crc import key_slot
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeout
from redis.sentinel import Sentinel

from kvtier.errors import TierError, TierTimeout
from kvtier.tiers.check import seconds_left
from kvtier.tiers.redis.address import Form, RedisAddress, ServerAddress
from kvtier.tiers.redis.connection import Connector
from kvtier.tiers.redis.resp import RespCommand
from kvtier.tiers.redis.server import Server

__all__ = ["Topology"]

_PAUSE_S = 0.25
"""Between two looks while something is wrong: a failover takes seconds."""

_PERIOD_S = 15.0
"""Between two looks while all is well."""

_CHECK_S = 0.5
"""A server that needs longer to answer a PING is not back."""

_Sentinels: Any = Sentinel  # the library leaves it untyped

_UNFIT = (RedisError, OSError, ValueError, TypeError, LookupError)
"""What the library raises where no answer comes, or none that it can read."""

_NUM_SLOTS = 16_384
_NOBODY = -1


@dataclass(frozen=True, slots=True)
class _Layout:
    """Who is who: primaries, and for each slot the index of the one that has it."""

    places: tuple[ServerAddress, ...]
    slots: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class _Chart:
    """A layout with its connections."""

    servers: tuple[Server, ...]
    slots: Sequence[int] = ()

    def owner(self, key: bytes) -> Server | None:
        if not self.slots:
            return self.servers[0]
        index = self.slots[key_slot(key)]
        return None if index == _NOBODY else self.servers[index]


class Topology:
    """The servers of one address. Connects to nothing before the first call."""

    def __init__(
        self,
        address: RedisAddress,
        connector: Connector,
        open_server: Callable[[ServerAddress], Server],
        on_new_primary: Callable[[], None] = lambda: None,
    ) -> None:
        self.fault = ""
        """Why the last look found no servers; empty if it found some."""
        self.changes = address.form is not Form.SINGLE
        """Whether servers may change their roles, and are looked after in the background."""
        self._look = _look_of(address, connector)
        self._open_server = open_server
        self._on_new_primary = on_new_primary
        self._chart = _Chart(())
        self._turns = itertools.count()
        self._looked = threading.Condition()
        self._wanted = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if not self.changes:
            self._chart = _Chart((open_server(address.places[0]),))

    @property
    def known(self) -> Sequence[Server]:
        """Return the primaries as last seen, from memory."""
        return self._chart.servers

    def owners(self, keys: Iterable[bytes], deadline_ns: int) -> list[Server | None]:
        """Return the primary of each key; None where nobody has its slot."""
        chart = self._await_chart(deadline_ns)
        return [chart.owner(key) for key in keys]

    def primaries(self, deadline_ns: int) -> Sequence[Server]:
        """Return all primaries."""
        return self._await_chart(deadline_ns).servers

    def report(self) -> None:
        """Say that something is wrong: it is looked again soon. Never blocks."""
        if self.changes and not self._closing.is_set():
            self._wanted.set()
            self._start()

    def close(self) -> None:
        """End the thread and all connections. Idempotent."""
        self._closing.set()
        self._wanted.set()
        for server in self._chart.servers:
            server.close()

    def _await_chart(self, deadline_ns: int) -> _Chart:
        if not self._chart.servers:
            self.report()
            with self._looked:
                self._looked.wait_for(
                    lambda: self._chart.servers or self.fault, seconds_left(deadline_ns)
                )
        chart = self._chart
        if not chart.servers:
            if self.fault:
                raise TierError(f"remote: {self.fault}")
            raise TierTimeout("remote: servers not discovered in time")
        return chart

    def _start(self) -> None:
        with self._looked:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="remote-look", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # no thread is to be had: the next report tries again
                    self._thread = None

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._wanted.clear()
                self._look_once()
                is_well = not self.fault and not any(server.fault for server in self.known)
                self._closing.wait(_PAUSE_S)
                if is_well:
                    self._wanted.wait(_PERIOD_S)
        finally:  # a bug ends the thread and is printed; the next report begins anew
            self._thread = None

    def _look_once(self) -> None:
        places = [server.place for server in self.known]
        # Another one first each time: a node that was cut off does not know that it is wrong.
        first = next(self._turns) % max(1, len(places))
        try:
            layout = self._look(places[first:] + places[:first])
        except TierError as error:
            self.fault = str(error)
        else:
            self._adopt(layout)
            self.fault = ""
        with self._looked:
            self._looked.notify_all()
        for server in self.known:
            if server.fault:
                deadline_ns = time.monotonic_ns() + int(_CHECK_S * 1e9)
                with contextlib.suppress(TierError):  # then its fault stays
                    server.ask([RespCommand((b"PING",))], deadline_ns)

    def _adopt(self, layout: _Layout) -> None:
        before = {server.place: server for server in self.known}
        servers = tuple(before.get(place) or self._open_server(place) for place in layout.places)
        self._chart = _Chart(servers, layout.slots)
        if before and not before.keys() >= set(layout.places):
            self._on_new_primary()
        for place, server in before.items():
            if place not in layout.places:
                server.close()
        if self._closing.is_set():
            self.close()


_Look = Callable[[Sequence[ServerAddress]], _Layout]


def _look_of(address: RedisAddress, connector: Connector) -> _Look:
    if address.form is Form.SENTINEL:
        return lambda _: _ask_sentinels(address, connector)
    return lambda known: _ask_cluster((*known, *address.places), connector)


def _ask_sentinels(address: RedisAddress, connector: Connector) -> _Layout:
    """Return the primary of a service, as the first Sentinel that answers knows it."""
    places = [(place.host, place.port) for place in address.places]
    # Sentinels mostly have no password; the server's is told only where they do not do without.
    for has_login in (False, True) if connector.address.password else (False,):
        options = connector.client_options(has_login=has_login)
        with contextlib.closing(_Sentinels(places, sentinel_kwargs=options)) as sentinel:
            try:
                host, port = sentinel.discover_master(address.service)
                return _Layout((ServerAddress(host, int(port)),))
            except _UNFIT:
                continue
    raise TierError(f"no Sentinel knows the primary of {address}")


def _ask_cluster(places: Iterable[ServerAddress], connector: Connector) -> _Layout:
    """Return the primaries and their slots, as the first node that answers knows them."""
    options = connector.client_options(has_login=True)
    why = "none has any"
    for place in dict.fromkeys(places):
        try:
            with Redis(place.host, place.port, **options) as client:
                answer = client.execute_command("CLUSTER SLOTS")
            if answer:
                return _layout_of(parse_cluster_slots(answer, current_host=place.host))
        except _UNFIT as error:
            why = f"{_reason(error)}, {place}"
    raise TierError(f"no cluster node answers with a slot map: {why}")


def _reason(error: Exception) -> str:
    """Return why a node did not tell, without the library's words: they may quote what was sent."""
    match error:
        case RedisTimeout():
            return "no answer in time"
        case AuthenticationError():
            return "it rejects the user or the password"
        case NoPermissionError():
            return "the user lacks permissions that the tier needs"
        case ResponseError():
            return "it rejects a command"
    cause = error.__context__ if isinstance(error.__context__, OSError) else error
    return str(getattr(cause, "strerror", None) or "unreachable").lower()


def _layout_of(answer: Mapping[tuple[int, int], Mapping[str, tuple[str, int]]]) -> _Layout:
    ranges = {slots: ServerAddress(*nodes["primary"][:2]) for slots, nodes in answer.items()}
    places = tuple(dict.fromkeys(ranges.values()))
    owners = array("h", [_NOBODY]) * _NUM_SLOTS
    for (first, last), place in ranges.items():
        for slot in range(first, last + 1):
            owners[slot] = places.index(place)
    return _Layout(places, owners)
