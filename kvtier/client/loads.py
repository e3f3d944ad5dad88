"""Loads as the client sees them: verifies the blocks that the daemon announces, under a lease."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kvtier.client.link import DaemonLink, chain_to_wire, rpc_faults
from kvtier.client.types import LoadedBlock
from kvtier.core.identity import HASH_BYTES, BlockHash
from kvtier.core.limits import CHAIN_BLOCKS_MAX
from kvtier.core.request import LoadPurpose
from kvtier.core.residency import TierName
from kvtier.errors import DaemonSlow, DaemonUnavailable
from kvtier.observe.trace import TRACES
from kvtier.v1 import engine_pb2 as pb
from kvtier.wire.convert import purpose_to_wire, tier_from_wire

__all__ = ["HeldBlocks", "OpenLoad"]

_DAEMON_SHARE = 0.9
"""Share of a load's time after which the daemon ends it; in the rest, its last message arrives."""

_RELEASE_TIMEOUT_S = 0.1
"""Wait for a release after the load's deadline; it then continues in the background."""

_BACKGROUND_RELEASE_TIMEOUT_S = 5.0


class _Replies(Protocol):
    """A gRPC response stream."""

    def __iter__(self) -> Iterator[pb.LoadReply]: ...

    def cancel(self) -> None:
        """End it early."""


class OpenLoad:
    """One ``Load`` call and its lease; the call begins at construction."""

    def __init__(  # noqa: PLR0913 - a call of that many fields
        self,
        link: DaemonLink,
        tenant: bytes,
        hashes: Sequence[BlockHash],
        first: int,
        timeout_s: float,
        *,
        decision: int,
        purpose: LoadPurpose,
        from_back: bool = False,
    ) -> None:
        self._link = link
        self._tenant = tenant
        self._hashes = hashes[:CHAIN_BLOCKS_MAX]
        self._first = first
        self._from_back = from_back
        self._num_blocks = len(self._hashes) - first
        self._lease = 0
        self._corrupt: list[int] = []
        """Positions of corrupt blocks, in the order announced."""
        self._end = ""
        now_s = time.monotonic()
        self._deadline_s = now_s + timeout_s
        self.good_until_s = now_s + timeout_s * _DAEMON_SHARE + link.lease_s
        """The lease holds at least until this time on the monotonic clock."""
        request = pb.LoadRequest(
            session=link.session,
            chain=chain_to_wire(tenant, hashes),
            first=first,
            deadline_ms=int(timeout_s * _DAEMON_SHARE * 1000),
            decision=decision,
            from_back=from_back,
            purpose=purpose_to_wire(purpose),
        )
        with rpc_faults():
            self._replies: _Replies = link.stub.Load(
                request, timeout=timeout_s, metadata=TRACES.metadata()
            )

    def blocks(self) -> Iterator[LoadedBlock | str]:
        """Yield verified blocks as they arrive, then the reason for the end.

        A block is good only once the next item was requested and arrived. If the lease ran out
        while the caller copied, this raises DaemonSlow instead, and the copy must not be used.
        """
        with rpc_faults():
            try:
                for place, (index, tier, payload, is_sound) in enumerate(self._announced()):
                    if not is_sound:
                        self._corrupt.append(place)
                        self._end = "corrupt"
                        break
                    yield LoadedBlock(index, tier, payload, self.good_until_s)
                    if time.monotonic() > self.good_until_s:
                        raise DaemonSlow("the lease ran out while copying")
            finally:
                self.release()
        yield self._end or "daemon_away"

    def hold(self) -> "HeldBlocks":
        """Wait until all blocks have arrived, and keep the lease of those that are sound."""
        tiers: list[TierName] = []
        with rpc_faults():
            try:
                for place, (_, tier, _, is_sound) in enumerate(self._announced()):
                    # Blocks behind a corrupt one do not count, but the lease lasts only if the
                    # call is read to its end.
                    if self._corrupt:
                        continue
                    if is_sound:
                        tiers.append(tier)
                    else:
                        self._corrupt.append(place)
            except BaseException:
                self.release()
                raise
        end = "corrupt" if self._corrupt else self._end or "daemon_away"
        held = HeldBlocks(tuple(tiers), end, self.good_until_s, self.release_in_background)
        if not tiers:
            held.release()
        return held

    def release(self) -> None:
        """End the load and its lease, and wait briefly for the daemon to confirm."""
        timeout_s = max(self._deadline_s - time.monotonic(), _RELEASE_TIMEOUT_S)
        try:
            if self._lease:
                self._send_release(timeout_s)
        except DaemonSlow:
            self.release_in_background()
        except DaemonUnavailable:
            pass  # the session is over, and the lease with it
        finally:
            # Not earlier: the daemon ends the lease with the call, and would not learn of corrupt
            # blocks.
            self._replies.cancel()

    def release_in_background(self) -> None:
        """End the lease of a finished load without waiting. Never raises."""
        if not self._lease:
            return

        def release() -> None:
            with contextlib.suppress(DaemonUnavailable):
                self._send_release(_BACKGROUND_RELEASE_TIMEOUT_S)

        # If no thread can be started, the lease expires by itself.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=release, name="kvtier-let-go", daemon=True).start()

    def _announced(self) -> Iterator[tuple[int, TierName, memoryview, bool]]:
        """Yield index, tier and payload of each announced block, and whether it is sound."""
        place = 0
        for reply in self._replies:
            self._lease = reply.lease
            self._num_blocks = reply.blocks or self._num_blocks
            for at, offset in enumerate(reply.offsets):
                ahead = self._num_blocks - 1 - place if self._from_back else place
                index = self._first + ahead
                payload = self._link.view(offset)
                checksum = reply.checksums[at * HASH_BYTES : (at + 1) * HASH_BYTES]
                header = self._link.header(self._tenant, self._hashes, index, checksum)
                yield index, tier_from_wire(reply.tiers[at]), payload, header.matches(payload)
                place += 1
            self._end = reply.end

    def _send_release(self, timeout_s: float) -> None:
        request = pb.ReleaseRequest(
            session=self._link.session, lease=self._lease, corrupt=self._corrupt
        )
        with rpc_faults():
            self._link.stub.Release(request, timeout=timeout_s)


class HeldBlocks:
    """Verified blocks that stay in the arena until they are released or ``good_until_s``.

    They do not keep their link in use: if it breaks, or the daemon ends, the lease ends as well.
    """

    def __init__(
        self,
        tiers: tuple[TierName, ...],
        end: str,
        good_until_s: float,
        release: Callable[[], None],
    ) -> None:
        self.tiers = tiers
        """The tier that each block came from, starting at the first requested block."""
        self.end = end
        """Why no more blocks are held."""
        self.good_until_s = good_until_s
        """When the lease may end, on the monotonic clock."""
        self._release: Callable[[], None] | None = release
        self._lock = threading.Lock()

    def release(self) -> None:
        """Release the blocks and report the corrupt ones. Idempotent; never waits or raises."""
        with self._lock:
            release, self._release = self._release, None
        if release is not None:
            release()
