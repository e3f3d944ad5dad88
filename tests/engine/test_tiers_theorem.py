"""The theorem on the demo model: the tokens of ``generate``, whatever the tiers do."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvtier.core.identity import NO_TENANT, chain_root, hash_blocks
from kvtier.engine.model import LoadedModel
from kvtier.engine.settings import EngineSettings
from kvtier.testing.child import work_directory
from kvtier.testing.running_node import RunningNode
from kvtier.transfer.shm import attach
from tests.engine.attached import BLOCK_TOKENS, AttachedEngine, attached
from tests.engine.models import Reference

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(600)]

NUM_TOKENS = 8
NUM_BLOCKS = 6
PROMPT_TOKENS = NUM_BLOCKS * BLOCK_TOKENS + 50
FULL = NUM_BLOCKS * BLOCK_TOKENS
SETTINGS = EngineSettings(pool_tokens=2048, block_tokens=BLOCK_TOKENS, is_poisoned=True)
TEXT = (
    "A tier keeps what the one above it had no room for. A block that comes back is the block "
    "that was put away, or it does not come back at all. "
)


@pytest.fixture(scope="module")
def prompt(demo: LoadedModel) -> tuple[int, ...]:
    numbered = "".join(f"{number}. {TEXT}" for number in range(40))
    tokens = tuple(demo.encode(numbered)[:PROMPT_TOKENS])
    assert len(tokens) == PROMPT_TOKENS
    return tokens


@pytest.fixture(scope="module")
def right(demo: LoadedModel, prompt: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(Reference(demo).generate(prompt, NUM_TOKENS))


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with work_directory() as directory:
        yield RunningNode(
            directory,
            {"cpu.capacity": "128MiB", "cpu.slab": "16MiB", "ssd.capacity": "512MiB"}
            | {"ssd.segment": "64MiB"},
        )


@contextmanager
def timed(what: str) -> Iterator[None]:
    start_s = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - start_s:.2f} s")


def test_the_tokens_are_those_of_generate(
    demo: LoadedModel, prompt: tuple[int, ...], right: tuple[int, ...], node: RunningNode
) -> None:
    def ask(engine: AttachedEngine, what: str) -> dict[str, int]:
        with timed(what):
            answer = engine.complete(prompt, NUM_TOKENS)
        assert answer.tokens == right, what
        return answer.tiers

    rest = PROMPT_TOKENS - FULL
    with node.daemon() as daemon, attached(demo, node.socket, SETTINGS) as engine:
        assert ask(engine, "cold") == {"computed": PROMPT_TOKENS}
        assert ask(engine, "gpu")["gpu"] >= FULL
        node.await_idle()

        engine.forget()
        assert ask(engine, "cpu") == {"cpu": FULL, "computed": rest}

        engine.forget()
        node.drop("cpu")
        assert ask(engine, "ssd") == {"ssd": FULL, "computed": rest}
        node.await_idle()

        engine.forget()
        scribble(node, engine, prompt, position=3)
        assert ask(engine, "a load that fails half way")["cpu"] == 3 * BLOCK_TOKENS
        assert node.stat()["miss_reasons"]["cpu"]["checksum"] == 1
        node.await_idle()

        engine.forget()
        node.drop("cpu")
        pending = engine.submit(prompt, NUM_TOKENS)
        daemon.kill()
        answer = pending.answer()
        assert answer.tokens == right, "the daemon was killed"
        print(f"killed during the load: {answer.tiers}, {answer.usage.decision}")
        engine.forget()
        assert ask(engine, "no daemon") == {"computed": PROMPT_TOKENS}

    with node.daemon(), attached(demo, node.socket, SETTINGS) as engine:
        assert ask(engine, "ssd after a restart") == {"ssd": FULL, "computed": rest}


def scribble(
    node: RunningNode, engine: AttachedEngine, prompt: tuple[int, ...], position: int
) -> None:
    """Spoil a block in the arena, through a mapping like any client's."""
    assert engine.client is not None
    space = engine.runner.engine.key_space
    hashes = hash_blocks(chain_root(space.digest, NO_TENANT), prompt, BLOCK_TOKENS)
    wanted = [
        bytes(item.payload[:4096])
        for item in engine.client.load(NO_TENANT, hashes, 0)
        if not isinstance(item, str)
    ]
    mapping = attach(node.socket, 5)
    capacity_bytes = node.stat()["tiers"]["cpu"]["capacity_bytes"]
    arena = mapping.view(0, capacity_bytes)
    starts = [match.start() for match in re.finditer(re.escape(wanted[position]), bytes(arena))]
    assert starts, "the block is in the arena"
    for start in starts:  # in slots that are free, too, from when it was dropped
        arena[start + 2000] ^= 0x40
    arena.release()
    mapping.close()
