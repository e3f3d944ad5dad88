"""Tiers that rot, lie, hang and die: the tokens stay right, the time is kept, and it mends."""

import random
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvtier.client import ClientDeadlines
from kvtier.engine.model import LoadedModel
from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode
from kvtier.tiers.redis.value import HEAD_BYTES
from tests.engine.attached import BLOCK_TOKENS, Answer, AttachedEngine, attached
from tests.engine.models import Reference
from tests.integration.redis_child import RedisServer

pytestmark = pytest.mark.slow

NUM_BLOCKS = 6
FULL = NUM_BLOCKS * BLOCK_TOKENS
PROMPT_TOKENS = FULL + 9
PAGE = 4096
MAGIC = b"KVTBLOCK"


DEADLINES = ClientDeadlines(lookup_s=2)
"""As usual, but for a lookup: on a busy machine its quarter of a second may be over."""


def prompt_of(seed: int) -> tuple[int, ...]:
    choose = random.Random(seed)
    return tuple(choose.randrange(3, 256) for _ in range(PROMPT_TOKENS))


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with work_directory() as directory:
        yield RunningNode(directory)


class Checked:
    """Asks an engine and compares every answer with the model's own."""

    def __init__(self, engine: AttachedEngine, reference: Reference) -> None:
        self._engine = engine
        self._reference = reference

    def complete(self, seed: int) -> Answer:
        prompt = prompt_of(seed)
        self._engine.forget()
        answer = self._engine.complete(prompt, 6)
        assert answer.tokens == tuple(self._reference.generate(prompt, 6))
        return answer


@contextmanager
def checked(
    tiny: LoadedModel,
    reference: Reference,
    node: RunningNode,
    deadlines: ClientDeadlines | None = None,
) -> Iterator[Checked]:
    with attached(tiny, node.socket, deadlines=deadlines) as engine:
        yield Checked(engine, reference)


# The disk


def flip(directory: Path, position: int, offset: int) -> None:
    """Change one byte of each record of that position; ``offset`` counts from its header page."""
    num_flipped = 0
    for path in directory.iterdir():
        with path.open("r+b") as file:
            content = file.read()
            for start in range(0, len(content), PAGE):
                if content[start : start + 8] != MAGIC:
                    continue
                if struct.unpack_from("<I", content, start + 12) == (position,):
                    file.seek(start + offset)
                    file.write(bytes([content[start + offset] ^ 0x10]))
                    num_flipped += 1
    assert num_flipped == 1, "there is one such block"


@pytest.mark.parametrize(
    ("offset", "reason"),
    [(PAGE + 5000, "checksum"), (20, "header"), (100, "header"), (0, "header")],
    ids=["payload", "key space", "its checksum", "magic"],
)
def test_a_block_that_rots_under_a_running_daemon(
    tiny: LoadedModel, reference: Reference, node: RunningNode, offset: int, reason: str
) -> None:
    # Unscrubbed: the scrub would come upon it before it is asked for.
    with node.daemon(ssd__scrub_rate=0), checked(tiny, reference, node) as engine:
        engine.complete(1)
        node.await_idle()
        flip(node.directory / "ssd", 3, offset)
        node.drop("cpu")
        hurt = engine.complete(1)
        assert hurt.tiers == {"ssd": 3 * BLOCK_TOKENS, "computed": PROMPT_TOKENS - 192}
        assert hurt.usage.decision == "loaded_part:failed"
        assert node.metric("kvtier_miss_blocks_total", tier="ssd") == 1
        assert node.metric("kvtier_miss_blocks_total", tier="ssd", reason=reason) == 1
        assert node.await_idle()["tiers"]["ssd"]["blocks"] == NUM_BLOCKS, "it was stored again"
        node.drop("cpu")
        assert engine.complete(1).tiers["ssd"] == FULL
        assert node.metric("kvtier_miss_blocks_total") == 1


@pytest.mark.parametrize("offset", [PAGE + 5000, 20], ids=["payload", "header"])
def test_a_block_that_rots_while_nothing_runs(
    tiny: LoadedModel, reference: Reference, node: RunningNode, offset: int
) -> None:
    with node.daemon() as daemon, checked(tiny, reference, node) as engine:
        engine.complete(1)
        node.await_idle()
        assert daemon.stop() == 0
    flip(node.directory / "ssd", 3, offset)
    with node.daemon(), checked(tiny, reference, node) as engine:
        hurt = engine.complete(1)
        assert hurt.tiers["ssd"] == 3 * BLOCK_TOKENS
        node.await_idle()
        node.drop("cpu")
        assert engine.complete(1).tiers["ssd"] == FULL, "it mends"


def test_segments_deleted_under_a_running_daemon(
    tiny: LoadedModel, reference: Reference, node: RunningNode
) -> None:
    with node.daemon() as daemon, checked(tiny, reference, node) as engine:
        engine.complete(1)
        node.await_idle()
        for path in (node.directory / "ssd").iterdir():
            if path.name != "lock":
                path.unlink()
        node.drop("cpu")
        engine.complete(1)
        node.await_idle(20)
        engine.complete(2)
        assert daemon.stop() == 0
    with node.daemon(), checked(tiny, reference, node) as engine:
        engine.complete(1)
        engine.complete(2)


# The server


def with_redis(directory: Path) -> tuple[RedisServer, RunningNode]:
    server = RedisServer(directory)
    node = RunningNode(
        directory,
        {"remote.url": server.url, "remote.deadline": "1s", "ssd.enabled": "false"},
    )
    return server, node


def state(node: RunningNode) -> str:
    return str(node.stat()["tiers"]["remote"]["state"])


@pytest.mark.redis
def test_values_that_others_changed(tiny: LoadedModel, reference: Reference) -> None:
    with work_directory() as directory, ExitStack() as stack:
        server, node = with_redis(directory)
        stack.enter_context(server.start())
        stack.enter_context(node.daemon())
        engine = stack.enter_context(checked(tiny, reference, node))
        engine.complete(1)
        node.await_idle()
        with server.client() as client:
            values = {
                struct.unpack_from("<I", value, 12)[0]: (key, value)
                for key in client.keys("kvtier:*")
                if (value := client.get(key)).startswith(MAGIC)
            }
            assert sorted(values) == list(range(NUM_BLOCKS))
            key, value = values[4]
            for wrong, reason in (
                (value[:200] + b"!" + value[201:], "checksum"),
                (values[3][1], "identity"),
                (value[:-1], "length"),
                (b"", "header"),
                (b"x" * len(value), "header"),
            ):
                client.set(key, wrong)
                node.drop("cpu")
                misses = node.metric("kvtier_miss_blocks_total", tier="remote", reason=reason)
                hurt = engine.complete(1)
                assert hurt.tiers["remote"] == 4 * BLOCK_TOKENS, reason
                after = node.metric("kvtier_miss_blocks_total", tier="remote", reason=reason)
                assert after == misses + 1
                node.await_idle()
                assert client.get(key)[HEAD_BYTES:] == value[HEAD_BYTES:], "stored again"
            node.drop("cpu")
            assert engine.complete(1).tiers["remote"] == FULL


@pytest.mark.redis
def test_a_server_that_freezes(tiny: LoadedModel, reference: Reference) -> None:
    with work_directory() as directory, ExitStack() as stack:
        server, node = with_redis(directory)
        child = stack.enter_context(server.start())
        stack.enter_context(node.daemon())
        engine = stack.enter_context(checked(tiny, reference, node, DEADLINES))
        engine.complete(1)
        node.await_idle()
        node.drop("cpu")
        with child.stopped():
            times = []
            for seed in (1, 2, 3, 1, 2, 3):
                start_s = time.monotonic()
                answer = engine.complete(seed)
                times.append(time.monotonic() - start_s)
                assert "remote" not in answer.tiers
            print("seconds while frozen:", *(f"{seconds:.2f}" for seconds in times))
            assert max(times) < DEADLINES.load_s
            await_true(lambda: state(node) == "out", "it is shown as out")
        start_s = time.monotonic()
        await_true(lambda: state(node) == "up", "it is shown as up again")
        print(f"up again after {time.monotonic() - start_s:.2f} s")
        node.await_idle()
        node.drop("cpu")
        assert engine.complete(1).tiers == {"remote": FULL, "computed": 9}


@pytest.mark.redis
def test_a_server_that_dies_and_comes_back_empty(tiny: LoadedModel, reference: Reference) -> None:
    with work_directory() as directory, ExitStack() as stack:
        server, node = with_redis(directory)
        child = stack.enter_context(server.start())
        stack.enter_context(node.daemon())
        engine = stack.enter_context(checked(tiny, reference, node, DEADLINES))
        engine.complete(1)
        node.await_idle()
        child.kill()
        node.drop("cpu")
        start_s = time.monotonic()
        assert engine.complete(1).tiers == {"computed": PROMPT_TOKENS}
        assert engine.complete(1).tiers["cpu"] == FULL
        assert time.monotonic() - start_s < DEADLINES.load_s
        engine.complete(2)
        await_true(lambda: state(node) == "out", "it is shown as out")
        node.drop("cpu")  # before the tier is back, or the blocks would be written to it again
        stack.enter_context(server.start())
        await_true(lambda: state(node) == "up", "it is shown as up again")
        assert engine.complete(1).tiers == {"computed": PROMPT_TOKENS}, "it came back empty"
        node.await_idle()
        node.drop("cpu")
        assert engine.complete(1).tiers["remote"] == FULL


@pytest.mark.redis
def test_a_daemon_starts_without_its_server(tiny: LoadedModel, reference: Reference) -> None:
    with work_directory() as directory, ExitStack() as stack:
        server, node = with_redis(directory)
        stack.enter_context(node.daemon())
        engine = stack.enter_context(checked(tiny, reference, node))
        engine.complete(1)
        stack.enter_context(server.start())
        await_true(lambda: state(node) == "up", "it is found")
        engine.complete(2)
        node.await_idle()
        node.drop("cpu")
        assert engine.complete(2).tiers["remote"] == FULL


# The daemon


def test_a_daemon_killed_while_it_serves(
    tiny: LoadedModel, reference: Reference, node: RunningNode
) -> None:
    deadlines = ClientDeadlines(lookup_s=2, reconnect_s=0.1)
    with node.daemon() as daemon, attached(tiny, node.socket, deadlines=deadlines) as engine:
        assert engine.client is not None
        right = {seed: tuple(reference.generate(prompt_of(seed), 6)) for seed in range(4)}
        for seed in right:
            engine.complete(prompt_of(seed), 6)
        node.await_idle()
        engine.forget()
        pending = [engine.submit(prompt_of(seed), 6) for seed in right]
        daemon.kill()
        assert [each.answer().tokens for each in pending] == list(right.values())
        engine.forget()
        alone = engine.complete(prompt_of(1), 6)
        assert alone.tokens == right[1]
        assert alone.usage.decision == "computed:daemon_away"
        with node.daemon():
            assert engine.client.wait_attached(30)
            engine.forget()
            again = engine.complete(prompt_of(2), 6)
            assert again.tokens == right[2]
            assert again.tiers["ssd"] == FULL


def test_a_daemon_that_stands_still_delays_an_answer_once(
    tiny: LoadedModel, reference: Reference, node: RunningNode
) -> None:
    deadlines = ClientDeadlines(0.25, 0.5, 0.5, 1.0)
    with node.daemon() as daemon, checked(tiny, reference, node, deadlines) as engine:
        engine.complete(1)
        with daemon.stopped():
            times = []
            for seed in (1, 2, 3):
                start_s = time.monotonic()
                answer = engine.complete(seed)
                times.append(time.monotonic() - start_s)
                assert answer.usage.decision == "computed:daemon_away"
            print("seconds:", *(f"{seconds:.2f}" for seconds in times))
            assert sum(times) < 3

        def hits() -> bool:
            return engine.complete(1).tiers.get("cpu") == FULL

        await_true(hits, "the daemon is used again")
