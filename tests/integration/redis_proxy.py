"""What may stand between a tier and its server: a proxy that fails, and a server that lies."""

import contextlib
import selectors
import socket
import threading
from types import TracebackType
from typing import Self


class _Listener:
    """A thread that listens on a port of its own until the context ends."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._thread = threading.Thread(target=self._run)
        self.is_over = threading.Event()

    def _run(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.is_over.set()
        self._thread.join(30)
        self._listener.close()
        assert not self._thread.is_alive()


class Proxy(_Listener):
    """Passes bytes on to a server, until it is told not to; then it is silent and stays open."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port
        self._peers: dict[socket.socket, socket.socket] = {}
        self._servers: set[socket.socket] = set()
        self._silent: set[socket.socket] = set()
        self._selector = selectors.DefaultSelector()
        self._allowance_bytes: int | None = None
        self._lock = threading.Lock()

    def silence(self) -> None:
        """Pass nothing on any more for the connections there are; new ones are not concerned."""
        self._silent |= set(self._peers)

    def allow(self, num_bytes: int | None) -> None:
        """Let so much more come from the server, in all, before everything is silent."""
        with self._lock:
            self._allowance_bytes = num_bytes

    def _run(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        while not self.is_over.is_set():
            for key, _ in self._selector.select(0.02):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj in self._peers:  # else it went with its peer just now
                    self._pass_on(key.fileobj)
        for one in [*self._peers]:
            one.close()
        self._selector.close()

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", self._port), timeout=5)
        near.settimeout(5)
        self._peers |= {near: far, far: near}
        self._servers.add(far)
        for one in (near, far):
            self._selector.register(one, selectors.EVENT_READ)

    def _pass_on(self, source: socket.socket) -> None:
        try:
            passed = source.recv(1 << 16)
        except OSError:
            passed = b""
        if not passed:
            return self._end(source)
        if source in self._silent:
            return None
        if source in self._servers:
            passed = self._allowed(source, passed)
        with contextlib.suppress(OSError):
            self._peers[source].sendall(passed)
        return None

    def _allowed(self, server: socket.socket, passed: bytes) -> bytes:
        with self._lock:
            if self._allowance_bytes is None:
                return passed
            passed = passed[: self._allowance_bytes]
            self._allowance_bytes -= len(passed)
            if not self._allowance_bytes:
                self._silent |= {server, self._peers[server]}
        return passed

    def _end(self, one: socket.socket) -> None:
        for each in (one, self._peers[one]):
            self._selector.unregister(each)
            each.close()
            del self._peers[each]


class Liar(_Listener):
    """Answers whatever it is sent with the same bytes, then is silent, or closes."""

    def __init__(self, answer: bytes, *, closes: bool = False) -> None:
        super().__init__()
        self._answer = answer
        self._closes = closes
        self.num_connections = 0

    def _run(self) -> None:
        self._listener.settimeout(0.02)
        open_ones: list[socket.socket] = []
        while not self.is_over.is_set():
            with contextlib.suppress(TimeoutError):
                open_ones.append(self._listener.accept()[0])
                self.num_connections += 1
            for one in [*open_ones]:
                if not self._serve(one):
                    open_ones.remove(one)
        for one in open_ones:
            one.close()

    def _serve(self, one: socket.socket) -> bool:
        one.settimeout(0.001)
        try:
            if one.recv(1 << 16):
                one.settimeout(5)
                one.sendall(self._answer)
                if not self._closes:
                    return True
        except TimeoutError:
            return True
        except OSError:
            pass
        one.close()
        return False
