"""One Redis server: its connections, its health, and warnings about its settings.

Rules
-----
* There are at most ``num_links`` connections. A caller that finds none free waits, until its
  deadline at most.
* Each connection is made on its own thread, because name resolution cannot be interrupted. The
  caller stops waiting at the deadline; a late connection serves the next call. A hanging resolver
  thus costs at most ``num_links`` threads, and then calls fail at once.
* After a fault the connection and all idle ones are closed, since the same cause breaks all of
  them. Late replies are thus never read.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeout

from kvtier.errors import TierError, TierTimeout
from kvtier.observe.log import Log
from kvtier.tiers.check import seconds_left
from kvtier.tiers.redis.address import ServerAddress
from kvtier.tiers.redis.connection import Connector, OnReply, ServerConnection
from kvtier.tiers.redis.resp import ErrorReply, Reply, RespCommand

__all__ = [
    "IDENTITY",
    "MEMORY",
    "QUESTIONS",
    "Server",
    "check_not_cluster",
    "free_bytes",
    "reply_fields",
    "warn_about_settings",
]


_log = Log("kvtier.remote")

MEMORY = RespCommand((b"INFO", b"memory"))
"""Returns how much memory a server uses, and how much it may use."""

QUESTIONS = (MEMORY, RespCommand((b"INFO", b"cluster")))
"""Sent on the first connection to a server; an ACL may forbid them."""


IDENTITY = RespCommand((b"INFO", b"server"))
"""Sent on each connection: the ``run_id`` of a server changes when it restarts."""


def warn_about_settings(place: ServerAddress, memory: Reply) -> None:
    """Warn of a server that will fill up or use all memory of its machine."""
    facts = reply_fields(memory)
    if facts.get("maxmemory") == "0":
        _log.warning("server has no maxmemory; it may use all memory of its machine", server=place)
    elif facts.get("maxmemory_policy") == "noeviction":
        _log.warning(
            "server evicts nothing; once full, it rejects blocks until some expire",
            server=place,
            maxmemory=facts["maxmemory"],
        )


def check_not_cluster(cluster: Reply) -> None:
    """Raise TierError for a cluster node, which has only some of the slots."""
    if reply_fields(cluster).get("cluster_enabled") == "1":
        raise TierError("it is a cluster node: use redis+cluster:// in remote.url")


def free_bytes(memory: Reply) -> float | None:
    """Return how much more memory a server may use; None if it does not report that."""
    facts = reply_fields(memory)
    try:
        most, used = int(facts["maxmemory"]), int(facts["used_memory"])
    except (KeyError, ValueError):
        return None
    return most - used if most else math.inf


def reply_fields(reply: Reply) -> dict[str, str]:
    """Return the fields of a reply to INFO by name."""
    text = reply.decode(errors="replace") if isinstance(reply, bytes) else ""
    return dict(line.partition(":")[::2] for line in text.splitlines() if ":" in line)


# Error replies that concern one key; the caller deals with them.
_OF_A_KEY = frozenset({"MOVED", "ASK", "TRYAGAIN", "WRONGTYPE"})

_LIMITS: Mapping[str, str] = {
    "OOM": "full: maxmemory reached and eviction is off",
    "READONLY": "read-only: it is a replica",
    "MISCONF": "read-only: it cannot write to its disk",
    "NOREPLICAS": "read-only: it has too few replicas",
}
"""Error replies after which reads continue."""

_FAULTS: Mapping[str, str] = {
    "BUSY": "busy with a script",
    "CLUSTERDOWN": "its cluster is down",
    "LOADING": "still loading its database",
    "MAXCLIENTS": "it has reached its client limit",
    "MASTERDOWN": "it has lost its primary",
    "NOAUTH": "it asks for a password",
    "NOPERM": "the user lacks permissions that the tier needs",
    "WRONGPASS": "it rejects the user or the password",
}

_SILENCE_S = 0.1
"""Silence of this length is the server's fault; with a shorter deadline, it is the caller's."""


class Server:
    """One server at ``place``. Thread-safe."""

    def __init__(
        self,
        place: ServerAddress,
        connector: Connector,
        timeout_s: float,
        num_links: int,
        *,
        is_alone: bool,
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        self.place = place
        self.fault = ""
        """Why the last call failed; empty if it did not."""
        self.limit = ""
        """Why the server accepts no blocks although it answers; empty if it accepts them."""
        self._connector = connector
        self._timeout_s = timeout_s
        self._num_links = num_links
        self._is_alone = is_alone
        self._on_restart = on_restart
        self._run_id = ""
        self._silence_s = min(timeout_s, _SILENCE_S)
        self._free = threading.BoundedSemaphore(num_links)
        self._lock = threading.Lock()
        self._idle: list[ServerConnection] = []
        self._busy: set[ServerConnection] = set()
        self._num_lost = 0
        self._is_inspected = False
        self._is_closed = False

    @property
    def is_replica(self) -> bool:
        """Return whether the server rejected a block because it is a replica."""
        return self.limit.startswith(_LIMITS["READONLY"])

    def __repr__(self) -> str:
        return f"Server({self.place})"

    def ask(
        self, commands: Sequence[RespCommand], deadline_ns: int, on_reply: OnReply | None = None
    ) -> list[Reply]:
        """Return the replies to commands. Raises TierError if the server is not fit to serve.

        Errors that concern one key, or only writes, are returned.
        """
        link = self._acquire(deadline_ns)
        try:
            replies = link.ask(commands, deadline_ns, on_reply)
        except TierTimeout as error:
            self._drop(link)
            if link.patience_s >= self._silence_s:
                raise self._fault_of(error) from None
            raise TierTimeout(f"remote: {error}, {self.place}") from None
        except TierError as error:
            self._drop(link)
            raise self._fault_of(error) from None
        except BaseException:
            self._drop(link)
            raise
        self._give_back(link)
        self._update_health(commands, replies)
        return replies

    def close(self) -> None:
        """Close all connections; running calls fail. Idempotent."""
        with self._lock:
            self._is_closed = True
            busy = list(self._busy)
        for link in busy:
            link.interrupt()
        self._forget_idle()

    def _update_health(self, commands: Sequence[RespCommand], replies: Sequence[Reply]) -> None:
        """Update the server's health from its replies."""
        fault = ""
        for command, reply in zip(commands, replies, strict=True):
            if command.words[0] == b"INFO":
                continue  # an ACL may forbid it
            code = reply.code if isinstance(reply, ErrorReply) else ""
            if code in _LIMITS:
                self.limit = f"{_LIMITS[code]} (-{code}), {self.place}"
            elif code and code not in _OF_A_KEY:
                fault = _fault(code, "it rejects a command")
            elif command.words[0] == b"SET" and not code:
                self.limit = ""
        if fault:
            self._forget_idle()  # new connections log in again, in case the login was revoked
            raise self._fault_of(TierError(fault))
        self.fault = ""

    def _fault_of(self, error: TierError) -> TierError:
        self.fault = f"{error}, {self.place}"
        return type(error)(f"remote: {self.fault}")

    def _acquire(self, deadline_ns: int) -> ServerConnection:
        if self._num_lost >= self._num_links:
            raise self._fault_of(TierError("connection attempts hang"))
        if not self._free.acquire(timeout=self._patience_s(deadline_ns)):
            raise TierTimeout(f"remote: every connection to {self.place} is busy")
        try:
            patience_s = self._patience_s(deadline_ns)
            link = self._idle_link()
        except BaseException:
            self._free.release()
            raise
        if link is None:
            link = self._new_connection(patience_s)
        with self._lock:
            self._busy.add(link)
            is_closed = self._is_closed  # closed before the connection was marked busy
        if is_closed:
            self._drop(link)
            raise TierError("the remote tier is closed")
        return link

    def _idle_link(self) -> ServerConnection | None:
        while True:
            with self._lock:
                if self._is_closed:
                    raise TierError("the remote tier is closed")
                link = self._idle.pop() if self._idle else None
            if link is None or link.is_alive:
                return link
            link.close()

    def _new_connection(self, patience_s: float) -> ServerConnection:
        """Return a new connection, or raise after releasing the caller's slot."""
        made: Future[ServerConnection] = Future()
        try:
            self._begin(made)
            return made.result(patience_s)
        except FutureTimeout:
            with self._lock:
                self._num_lost += 1
            made.add_done_callback(self._keep_late)
            error = TierTimeout("no connection in time")
            raise self._fault_of(error) if patience_s >= self._silence_s else error from None
        except TierError as error:
            self._free.release()
            raise self._fault_of(error) from None
        except BaseException:
            self._free.release()
            raise

    def _begin(self, made: "Future[ServerConnection]") -> None:
        making = threading.Thread(
            target=self._make, args=(made,), name="remote-connect", daemon=True
        )
        try:
            making.start()
        except RuntimeError as error:
            raise TierError(f"cannot connect: {error}") from None

    def _make(self, made: "Future[ServerConnection]") -> None:
        try:
            made.set_result(self._connected())
        except TierError as error:
            made.set_exception(error)
        except RedisTimeout:
            made.set_exception(TierTimeout("no connection in time"))
        except (RedisError, OSError, ValueError) as error:
            made.set_exception(TierError(_reason(error)))
        except BaseException as error:  # raised in the caller
            made.set_exception(error)

    def _connected(self) -> ServerConnection:
        link = ServerConnection(self._connector.connect(self.place), self._timeout_s)
        try:
            self._log_in(link)
        except BaseException:
            link.close()
            raise
        return link

    def _log_in(self, link: ServerConnection) -> None:
        login = self._connector.login()
        questions = [*login, IDENTITY, *(() if self._is_inspected else QUESTIONS)]
        deadline_ns = time.monotonic_ns() + int(self._timeout_s * 1e9)
        replies = link.ask(questions, deadline_ns)
        for reply in replies[: len(login)]:
            if isinstance(reply, ErrorReply):
                raise TierError(_fault(reply.code, "it rejects the login or the database"))
        if not self._is_inspected:
            memory, cluster = replies[len(login) + 1 :]
            if self._is_alone:
                check_not_cluster(cluster)
            warn_about_settings(self.place, memory)
            self._is_inspected = not isinstance(memory, ErrorReply)
        self._note_run_id(reply_fields(replies[len(login)]).get("run_id", ""))

    def _note_run_id(self, run_id: str) -> None:
        """Report a restart, or another server at this address: its blocks must be verified."""
        with self._lock:
            before, self._run_id = self._run_id, run_id or self._run_id
        if before not in {"", self._run_id}:
            self._on_restart()

    def _keep_late(self, made: "Future[ServerConnection]") -> None:
        with self._lock:
            self._num_lost -= 1
        if made.exception() is None:
            self._give_back(made.result())
        else:
            self._free.release()

    def _give_back(self, link: ServerConnection) -> None:
        with self._lock:
            self._busy.discard(link)
            is_kept = not self._is_closed
            if is_kept:
                self._idle.append(link)
        if not is_kept:
            link.close()
        self._free.release()

    def _drop(self, link: ServerConnection) -> None:
        with self._lock:
            self._busy.discard(link)
        link.close()
        self._free.release()
        self._forget_idle()

    def _forget_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()

    def _patience_s(self, deadline_ns: int) -> float:
        return min(self._timeout_s, seconds_left(deadline_ns))


def _fault(code: str, otherwise: str) -> str:
    return f"{_FAULTS.get(code, otherwise)} (-{code})"


def _reason(error: Exception) -> str:
    """Return why connecting failed, from the cause of the library's error."""
    cause = error.__context__ if isinstance(error.__context__, OSError) else error
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror.lower()
    return "unreachable"
