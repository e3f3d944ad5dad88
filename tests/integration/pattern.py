"""An engine without a model: its blocks' bytes are a function of their identity."""

import gc
import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from kvtier.client import Announcement, Client, ClientDeadlines, FoundBlocks, LoadedBlock
from kvtier.core.identity import (
    NO_TENANT,
    BlockHash,
    BlockHeader,
    KeySpace,
    chain_root,
    hash_blocks,
)
from kvtier.core.layout import KVLayout
from kvtier.core.plan import EngineLoad
from kvtier.core.request import NO_TRAITS, RequestTraits
from kvtier.testing.block import payload_of
from kvtier.tiers.base import Removed

BLOCK_BYTES = 8192
BLOCK_TOKENS = 4


def key_space(
    model_config: str = "{}", *, block_bytes: int = BLOCK_BYTES, name: str = "paged"
) -> KeySpace:
    layout = KVLayout(name, 1, BLOCK_TOKENS, block_bytes, "float32", "pattern")
    return KeySpace(
        weights=bytes(32),
        model_config=model_config,
        layout=layout,
        compute_dtype="float32",
        engine="pattern/1",
    )


def num_arenas() -> int:
    """Return how many mappings of daemons' arenas this process has, and somebody refers to."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:kvtier-arena")


Prompt = int | tuple[int, ...]
"""One token again and again, or one token a block, of which there are at least ``num_blocks``."""


class PatternEngine:
    """Stores and loads prompts of ``num_blocks`` blocks, and checks every byte that comes back."""

    def __init__(
        self,
        socket_path: Path,
        space: KeySpace | None = None,
        tenant: bytes = NO_TENANT,
        deadlines: ClientDeadlines | None = None,
        *,
        name: str = "pattern",
        can_split: bool = False,
        drop: Callable[[], Removed | str] = Removed,
    ) -> None:
        self.space = space or key_space()
        self.tenant = tenant
        # Generous: these tests are about what is answered, others about when.
        self.deadlines = deadlines or ClientDeadlines(5, 10, 10, 0.1)
        self.client = Client(
            socket_path,
            self.space,
            name,
            deadlines=self.deadlines,
            can_split=can_split,
            drop=drop,
        )

    def __enter__(self) -> Self:
        self.client.start()
        if not self.client.wait_attached(30):
            self.client.close()
            raise AssertionError("the client did not find its daemon")
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.client.close()

    def chain(self, prompt: Prompt, num_blocks: int) -> list[BlockHash]:
        root = chain_root(self.space.digest, self.tenant)
        words = prompt if isinstance(prompt, tuple) else (prompt,) * num_blocks
        tokens = [word for word in words[:num_blocks] for _ in range(BLOCK_TOKENS)]
        return hash_blocks(root, tokens, BLOCK_TOKENS)

    def payloads(self, prompt: Prompt, num_blocks: int) -> list[bytes]:
        hashes = self.chain(prompt, num_blocks)
        parents = [chain_root(self.space.digest, self.tenant), *hashes]
        size = self.space.layout.block_bytes
        return [
            payload_of(BlockHeader(self.space.digest, self.tenant, own, parent, index, size))
            for index, (own, parent) in enumerate(zip(hashes, parents, strict=False))
        ]

    def announce(
        self, prompt: Prompt, num_blocks: int = 4, traits: RequestTraits = NO_TRAITS
    ) -> None:
        self.client.announce([Announcement(traits, self.tenant, self.chain(prompt, num_blocks), 0)])

    def ask(
        self,
        prompt: Prompt,
        num_blocks: int = 4,
        traits: RequestTraits = NO_TRAITS,
        load: EngineLoad | None = None,
    ) -> FoundBlocks:
        """Look a prompt up, and return the whole answer."""
        return self.client.lookup(self.tenant, self.chain(prompt, num_blocks), 0, traits, load)

    def store(
        self,
        prompt: Prompt,
        num_blocks: int = 4,
        first: int = 0,
        *,
        traits: RequestTraits = NO_TRAITS,
        num_prompt_blocks: int = -1,
    ) -> int:
        payloads = self.payloads(prompt, num_blocks)

        def fill(indexes: Sequence[int], slots: Sequence[memoryview]) -> Generator[None]:
            for index, slot in zip(indexes, slots, strict=True):
                slot[:] = payloads[index]
                yield

        return self.client.store(
            self.tenant,
            self.chain(prompt, num_blocks),
            first,
            fill,
            traits=traits,
            num_prompt_blocks=num_prompt_blocks,
        )

    def lookup(self, prompt: Prompt, num_blocks: int = 4, first: int = 0) -> tuple[list[str], str]:
        chain = self.chain(prompt, num_blocks)
        found = self.client.lookup(self.tenant, chain, first)
        return [tier.value for tier in found.tiers], found.reason

    def load(
        self,
        prompt: Prompt,
        num_blocks: int = 4,
        first: int = 0,
        on_block: Callable[[LoadedBlock], None] = lambda _: None,
    ) -> tuple[list[str], str]:
        """Return the tiers of the blocks that came, all right to the last byte, and the end."""
        payloads = self.payloads(prompt, num_blocks)
        tiers: list[str] = []
        end = ""
        for item in self.client.load(self.tenant, self.chain(prompt, num_blocks), first):
            if isinstance(item, str):
                end = item
            else:
                assert item.index == first + len(tiers), "blocks come in order"
                assert item.payload == payloads[item.index], "a block is what was stored"
                tiers.append(item.tier.value)
                on_block(item)
        return tiers, end


def in_threads(work: Sequence[Callable[[], object]], timeout_s: float = 60) -> None:
    """Run all at once; fails where one fails or is not done in time."""
    faults: list[BaseException] = []

    def run(each: Callable[[], object]) -> None:
        try:
            each()
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=run, args=(each,), daemon=True) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        assert not thread.is_alive(), "a thread did not end"
    if faults:
        raise faults[0]
