"""Which server has which block, discovered in the background.

A single server is fixed. Behind Sentinels and in a cluster, servers change roles, and *discovery*
asks for the current ones. It runs on its own thread, after a caller has reported a problem and
periodically, but at most every ``_PAUSE_S``. Only the first call waits for it, until its deadline.

A failed server is not called again until discovery finds that it answers. So a dead node delays
only the calls that detected it, by a timeout.
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
"""Seconds between two discoveries while there is a problem: a failover takes seconds."""

_PERIOD_S = 15.0
"""Seconds between two discoveries otherwise."""

_CHECK_S = 0.5
"""A server that needs longer to answer a PING is not back."""

_Sentinels: Any = Sentinel  # untyped in the library

_UNFIT = (RedisError, OSError, ValueError, TypeError, LookupError)
"""Errors of the library for a missing or unreadable answer."""

_NUM_SLOTS = 16_384
_UNASSIGNED = -1


@dataclass(frozen=True, slots=True)
class _SlotMap:
    """The primaries, and for each slot the index of its primary."""

    places: tuple[ServerAddress, ...]
    slots: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class _Routing:
    """A slot map with its connections."""

    servers: tuple[Server, ...]
    slots: Sequence[int] = ()

    def owner(self, key: bytes) -> Server | None:
        if not self.slots:
            return self.servers[0]
        index = self.slots[key_slot(key)]
        return None if index == _UNASSIGNED else self.servers[index]


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
        """Why the last discovery found no servers; empty if it found some."""
        self.changes = address.form is not Form.SINGLE
        """Servers may change roles, so discovery runs in the background."""
        self._discover = _discovery_of(address, connector)
        self._open_server = open_server
        self._on_new_primary = on_new_primary
        self._routing = _Routing(())
        self._turns = itertools.count()
        self._discovered = threading.Condition()
        self._wanted = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if not self.changes:
            self._routing = _Routing((open_server(address.places[0]),))

    @property
    def known(self) -> Sequence[Server]:
        """Return the primaries as last discovered, from memory."""
        return self._routing.servers

    def owners(self, keys: Iterable[bytes], deadline_ns: int) -> list[Server | None]:
        """Return the primary of each key; None if no server has its slot."""
        routing = self._await_routing(deadline_ns)
        return [routing.owner(key) for key in keys]

    def primaries(self, deadline_ns: int) -> Sequence[Server]:
        """Return all primaries."""
        return self._await_routing(deadline_ns).servers

    def report(self) -> None:
        """Report a problem: discovery runs soon. Never blocks."""
        if self.changes and not self._closing.is_set():
            self._wanted.set()
            self._start()

    def close(self) -> None:
        """End the thread and all connections. Idempotent."""
        self._closing.set()
        self._wanted.set()
        for server in self._routing.servers:
            server.close()

    def _await_routing(self, deadline_ns: int) -> _Routing:
        if not self._routing.servers:
            self.report()
            with self._discovered:
                self._discovered.wait_for(
                    lambda: self._routing.servers or self.fault, seconds_left(deadline_ns)
                )
        routing = self._routing
        if not routing.servers:
            if self.fault:
                raise TierError(f"remote: {self.fault}")
            raise TierTimeout("remote: servers not discovered in time")
        return routing

    def _start(self) -> None:
        with self._discovered:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="remote-look", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # no thread could start; the next report retries
                    self._thread = None

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._wanted.clear()
                self._discover_once()
                is_well = not self.fault and not any(server.fault for server in self.known)
                self._closing.wait(_PAUSE_S)
                if is_well:
                    self._wanted.wait(_PERIOD_S)
        finally:  # a bug ends the thread; the next report starts another
            self._thread = None

    def _discover_once(self) -> None:
        places = [server.place for server in self.known]
        # Start with another node each time: an isolated node's answer may be wrong.
        first = next(self._turns) % max(1, len(places))
        try:
            slot_map = self._discover(places[first:] + places[:first])
        except TierError as error:
            self.fault = str(error)
        else:
            self._adopt(slot_map)
            self.fault = ""
        with self._discovered:
            self._discovered.notify_all()
        for server in self.known:
            if server.fault:
                deadline_ns = time.monotonic_ns() + int(_CHECK_S * 1e9)
                with contextlib.suppress(TierError):  # its fault stays
                    server.ask([RespCommand((b"PING",))], deadline_ns)

    def _adopt(self, slot_map: _SlotMap) -> None:
        before = {server.place: server for server in self.known}
        servers = tuple(before.get(place) or self._open_server(place) for place in slot_map.places)
        self._routing = _Routing(servers, slot_map.slots)
        if before and not before.keys() >= set(slot_map.places):
            self._on_new_primary()
        for place, server in before.items():
            if place not in slot_map.places:
                server.close()
        if self._closing.is_set():
            self.close()


_Discover = Callable[[Sequence[ServerAddress]], _SlotMap]


def _discovery_of(address: RedisAddress, connector: Connector) -> _Discover:
    if address.form is Form.SENTINEL:
        return lambda _: _ask_sentinels(address, connector)
    return lambda known: _ask_cluster((*known, *address.places), connector)


def _ask_sentinels(address: RedisAddress, connector: Connector) -> _SlotMap:
    """Return the primary of a service from the first Sentinel that answers."""
    places = [(place.host, place.port) for place in address.places]
    # Sentinels rarely need a password; the server's is sent only if they do.
    for has_login in (False, True) if connector.address.password else (False,):
        options = connector.client_options(has_login=has_login)
        with contextlib.closing(_Sentinels(places, sentinel_kwargs=options)) as sentinel:
            try:
                host, port = sentinel.discover_master(address.service)
                return _SlotMap((ServerAddress(host, int(port)),))
            except _UNFIT:
                continue
    raise TierError(f"no Sentinel knows the primary of {address}")


def _ask_cluster(places: Iterable[ServerAddress], connector: Connector) -> _SlotMap:
    """Return the primaries and their slots from the first node that answers."""
    options = connector.client_options(has_login=True)
    why = "none has any"
    for place in dict.fromkeys(places):
        try:
            with Redis(place.host, place.port, **options) as client:
                answer = client.execute_command("CLUSTER SLOTS")
            if answer:
                return _slot_map_of(parse_cluster_slots(answer, current_host=place.host))
        except _UNFIT as error:
            why = f"{_reason(error)}, {place}"
    raise TierError(f"no cluster node answers with a slot map: {why}")


def _reason(error: Exception) -> str:
    """Return why a node did not answer, without the library's text: it may quote what was sent."""
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


def _slot_map_of(answer: Mapping[tuple[int, int], Mapping[str, tuple[str, int]]]) -> _SlotMap:
    ranges = {slots: ServerAddress(*nodes["primary"][:2]) for slots, nodes in answer.items()}
    places = tuple(dict.fromkeys(ranges.values()))
    owners = array("h", [_UNASSIGNED]) * _NUM_SLOTS
    for (first, last), place in ranges.items():
        for slot in range(first, last + 1):
            owners[slot] = places.index(place)
    return _SlotMap(places, owners)
