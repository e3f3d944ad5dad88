"""FakeEngine: a client of a node in a ``NodeHarness``, with the checks of the real client.

It stores blocks whose bytes are a function of their identity. It accepts a loaded block exactly if
``kvtier.client`` would: the checksum binds the bytes to the requested identity, and the lease still
holds after the copy. The accepted bytes must then equal the expected ones.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from kvtier.core.identity import NO_TENANT, BlockHeader, payload_checksum
from kvtier.core.layout import KVLayout
from kvtier.core.plan import EngineLoad, PlanOutcome, StepSample
from kvtier.core.request import NO_TRAITS, RequestTraits
from kvtier.core.residency import TierName
from kvtier.errors import DaemonUnavailable
from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev
from kvtier.testing.block import TEST_KEY_SPACE, make_chain, payload_of
from kvtier.testing.node_harness import NodeHarness
from kvtier.tiers.base import BlockWrite, Removed

__all__ = ["Blocks", "FakeEngine", "FakeLoad"]

Blocks = Sequence[BlockWrite]
"""A chain from its root on, each block with its only valid bytes."""

_LEASE_MARGIN_NS = 50_000_000
"""Copying stops this long before a lease ends, as in the real client."""

_DEADLINE_NS = 400_000_000


class FakeEngine:
    """One engine; ``attach`` registers it with a node."""

    def __init__(
        self,
        name: str,
        *,
        key_space: bytes = TEST_KEY_SPACE,
        payload_bytes: int = 3000,
        can_split: bool = False,
    ) -> None:
        self.name = name
        self.can_split = can_split
        self.key_space = key_space
        self.layout = KVLayout("paged", 1, 64, payload_bytes, "float32", "fake")
        self.harness: NodeHarness
        self.session = ""
        self.ticket = ""
        self._num_tickets = 0

    def attach(self, harness: NodeHarness) -> None:
        """Map the harness's arena and register."""
        self._num_tickets += 1
        self.harness = harness
        self.ticket = f"{self.name}.{self._num_tickets}"
        answer = harness.ask(
            lambda call: ev.Register(
                call,
                self.ticket,
                self.key_space,
                self.layout,
                self.name,
                "shm",
                1,
                can_split=self.can_split,
            )
        )
        assert isinstance(answer, ac.Registration), answer
        self.session = answer.session

    def die(self) -> None:
        """Die at once; the kernel notifies the node."""
        self.harness.post(ev.SessionEnded(self.ticket))
        self.session = ""

    def chain(self, numbers: Iterable[int], tenant: bytes = NO_TENANT) -> Blocks:
        """Return the blocks of a prompt, in this engine's key space."""
        return make_chain(
            list(numbers), self.layout.block_bytes, key_space=self.key_space, tenant=tenant
        )

    # Lookups

    def announce(
        self,
        blocks: Blocks,
        traits: RequestTraits = NO_TRAITS,
        first: int = 0,
        over: Sequence[str] = (),
    ) -> None:
        """Announce a request, and report the ids of finished ones."""
        answer = self.answer(
            self._call(
                blocks,
                lambda call, tenant, hashes: ev.Announce(
                    call,
                    self.session,
                    (ev.AnnouncedRequest(traits, tenant, hashes, first),),
                    tuple(over),
                ),
            )
        )
        assert answer is None, answer

    def lookup(
        self,
        blocks: Blocks,
        first: int = 0,
        *,
        within_ns: int = _DEADLINE_NS,
        traits: RequestTraits = NO_TRAITS,
        load: EngineLoad | None = None,
    ) -> int:
        """Start a lookup and return its call; the answer may come later."""
        deadline_ns = self.harness.clock() + within_ns
        return self._call(
            blocks,
            lambda call, tenant, hashes: ev.Lookup(
                call,
                self.session,
                tenant,
                hashes,
                first,
                deadline_ns,
                traits,
                load or EngineLoad(),
            ),
        )

    def found(self, blocks: Blocks, first: int = 0) -> tuple[TierName, ...]:
        """Look up and return the tiers; for lookups that are answered at once."""
        answer = self.answer(self.lookup(blocks, first))
        assert isinstance(answer, ac.LookupResult), answer
        return tuple(tier for tier, length in answer.runs for _ in range(length))

    def answer(self, call: int) -> ac.Answer:
        """Take the answer to a call, which must have come.

        Raises DaemonUnavailable if the node does not know the session because it was restarted.
        """
        answer = self.harness.answers.pop(call)
        if isinstance(answer, ac.Refused) and answer.kind == "session":
            raise DaemonUnavailable(answer.message)
        return answer

    # Stores

    def prepare(
        self,
        blocks: Blocks,
        first: int = 0,
        *,
        traits: RequestTraits = NO_TRAITS,
        num_prompt_blocks: int = -1,
    ) -> ac.StoreGrant:
        """Ask for slots."""
        answer = self.answer(
            self._call(
                blocks,
                lambda call, tenant, hashes: ev.PrepareStore(
                    call, self.session, tenant, hashes, first, traits, num_prompt_blocks
                ),
            )
        )
        assert isinstance(answer, ac.StoreGrant), answer
        return answer

    def copy(self, granted: ac.StoreGrant, blocks: Blocks) -> Iterator[bytes]:
        """Fill the granted slots one by one, half a block at a time; yield each checksum.

        The caller may stop anywhere: an engine that dies leaves a torn block.
        """
        for index, offset in zip(granted.indexes, granted.offsets, strict=True):
            header = blocks[index].header
            payload, slot = payload_of(header), self.harness.view(offset, header.payload_bytes)
            half = len(payload) // 2
            slot[:half] = payload[:half]
            yield b""
            slot[half:] = payload[half:]
            yield payload_checksum(replace(header, checksum=b""), slot)

    def complete(self, granted: ac.StoreGrant, checksums: Sequence[bytes]) -> int:
        """Publish the leading blocks that were copied; return their number."""
        answer = self.answer(
            self.harness.call(
                lambda call: ev.CompleteStore(call, self.session, granted.lease, tuple(checksums))
            )
        )
        assert isinstance(answer, ac.StoreResult), answer
        return answer.num_blocks

    def store(
        self, blocks: Blocks, first: int = 0, *, traits: RequestTraits = NO_TRAITS
    ) -> ac.StoreGrant:
        """Prepare, copy and complete."""
        granted = self.prepare(blocks, first, traits=traits)
        if granted.lease:
            checksums = [checksum for checksum in self.copy(granted, blocks) if checksum]
            assert self.complete(granted, checksums) == len(granted.indexes)
        return granted

    # Loads

    def load(
        self,
        blocks: Blocks,
        first: int = 0,
        *,
        within_ns: int = _DEADLINE_NS,
        decision: int = 0,
        from_back: bool = False,
    ) -> "FakeLoad":
        """Start a load; blocks arrive as the node's tiers progress."""
        asked_ns = self.harness.clock()
        call = self._call(
            blocks,
            lambda call, tenant, hashes: ev.Load(
                call,
                self.session,
                tenant,
                hashes,
                first,
                asked_ns + within_ns,
                decision,
                from_back,
            ),
        )
        if call in self.harness.answers:
            raise AssertionError(f"refused: {self.answer(call)}")
        return FakeLoad(self, blocks, first, call, asked_ns, from_back=from_back)

    # Reports

    def measured(
        self,
        steps: Sequence[StepSample] = (),
        outcomes: Sequence[PlanOutcome] = (),
        load: EngineLoad | None = None,
    ) -> None:
        """Report step times, outcomes of decisions, and the current load."""
        call = self.harness.call(
            lambda call: ev.EngineTierReport(
                call,
                self.session,
                0,
                0,
                0,
                0,
                steps=tuple(steps),
                outcomes=tuple(outcomes),
                load=load or EngineLoad(),
            )
        )
        self.answer(call)

    def report(self, order: int, num_blocks: int) -> None:
        """Answer an order to empty this engine's own tier."""
        removed = Removed(num_blocks, num_blocks * self.layout.block_bytes)
        call = self.harness.call(
            lambda call: ev.EngineTierReport(call, self.session, 0, 0, 0, 0, order, removed)
        )
        self.answer(call)

    def _call(self, blocks: Blocks, make: Callable[[int, bytes, bytes], ev.Event]) -> int:
        tenant = blocks[0].header.tenant if blocks else NO_TENANT
        hashes = b"".join(block.header.block_hash for block in blocks)
        return self.harness.call(lambda call: make(call, tenant, hashes))


class FakeLoad:
    """One load of a ``FakeEngine``."""

    def __init__(
        self,
        engine: FakeEngine,
        blocks: Blocks,
        first: int,
        call: int,
        asked_ns: int,
        *,
        from_back: bool = False,
    ) -> None:
        self.accepted: list[TierName] = []
        """The tier of each block that was copied and verified, in order."""
        self.end = ""
        """Why no more blocks come; empty while unknown."""
        self._engine = engine
        self._harness = engine.harness
        self._blocks = blocks
        self._first = first
        self._call = call
        self._asked_ns = asked_ns
        self._from_back = from_back
        self._corrupt: list[int] = []

    @property
    def lease(self) -> int:
        """Return the lease's number, which comes with the first message."""
        return self._harness.progress[self._call][0].lease

    def announced(self) -> int:
        """Return how many blocks the node has announced."""
        return sum(len(message.offsets) for message in self._harness.progress[self._call])

    def steps(self) -> Iterator[None]:
        """Accept the announced blocks one by one; time may pass at each step.

        Anything may happen between the check of a block and its copy, and between the copy and the
        check of the clock: leases protect against that.
        """
        messages = list(self._harness.progress[self._call])
        announced = [
            each for m in messages for each in zip(m.offsets, m.checksums, m.tiers, strict=True)
        ]
        for offset, checksum, tier in announced[len(self.accepted) :]:
            if self.end:
                return
            wanted = self._blocks[self._place(messages[0].num_blocks)].header
            payload = self._harness.view(offset, wanted.payload_bytes)
            if not replace(wanted, checksum=checksum).matches(payload):
                self._corrupt.append(len(self.accepted))
                self.end = "corrupt"
                return
            yield
            copied = bytes(payload)
            yield
            lease_ns = self._harness.settings.lease_ns - _LEASE_MARGIN_NS
            if self._harness.clock() - self._asked_ns > lease_ns:
                self.end = "lease"
                return
            self._accept(wanted, copied, tier)
        self.end = self.end or messages[-1].end

    def take(self) -> list[TierName]:
        """Accept the announced blocks at once; return the tiers of all so far."""
        for _ in self.steps():
            pass
        return self.accepted

    def release(self) -> bool:
        """End the lease and name corrupt blocks; return whether it was still held."""
        call = self._harness.call(
            lambda call: ev.Release(call, self._engine.session, self.lease, tuple(self._corrupt))
        )
        answer = self._engine.answer(call)
        assert isinstance(answer, ac.ReleaseResult), answer
        return answer.held

    def _place(self, num_blocks: int) -> int:
        """Return the position in the chain of the next block of a lease."""
        num_taken = len(self.accepted)
        return self._first + (num_blocks - 1 - num_taken if self._from_back else num_taken)

    def _accept(self, wanted: BlockHeader, copied: bytes, tier: TierName) -> None:
        """Accept a block after comparing its bytes with the expected ones."""
        assert copied == payload_of(wanted), f"{self._engine.name} was served a wrong block"
        self.accepted.append(tier)
