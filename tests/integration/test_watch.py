"""What a client hears of its key space, and how it has it cleared, against a real daemon."""

import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtier.client import Client, ClientDeadlines
from kvtier.core.identity import KeySpace, tenant_digest
from kvtier.core.residency import TierName
from kvtier.core.residency_change import ResidencyChange
from kvtier.errors import DaemonSlow, DaemonUnavailable
from kvtier.testing.child import await_true, work_directory
from kvtier.testing.residency_model import ResidencyModel
from kvtier.testing.running_node import RunningNode
from kvtier.v1 import engine_pb2 as pb
from kvtier.v1 import engine_pb2_grpc
from kvtier.wire.convert import change_from_wire
from tests.integration.pattern import PatternEngine, key_space
from tests.integration.redis_child import RedisServer

pytestmark = pytest.mark.slow

CPU, SSD, REMOTE = TierName.CPU, TierName.SSD, TierName.REMOTE


class Watcher(PatternEngine):
    """An engine that hears of its key space."""

    def __init__(
        self,
        socket_path: Path,
        space: KeySpace | None = None,
        tenant: bytes = bytes(16),
        deadlines: ClientDeadlines | None = None,
        hear: ResidencyModel | None = None,
    ) -> None:
        super().__init__(socket_path, space, tenant, deadlines)
        self.heard = hear or ResidencyModel()
        self.client = Client(
            socket_path, self.space, "watcher", deadlines=self.deadlines, watch=self.heard
        )

    def hears(self, prompt: int, *tiers: TierName, num_blocks: int = 4) -> bool:
        """Tell whether exactly these tiers have the prompt's blocks, as far as was told."""
        wanted = set(self.chain(prompt, num_blocks))
        known = {tier: wanted & self.heard.blocks(tier) for tier in (CPU, SSD, REMOTE)}
        return all(known[tier] == (wanted if tier in tiers else set()) for tier in known)

    def await_heard(self, prompt: int, *tiers: TierName, num_blocks: int = 4) -> None:
        await_true(
            lambda: self.hears(prompt, *tiers, num_blocks=num_blocks),
            f"the blocks of {prompt} are told to be in {tiers}",
            timeout_s=30,  # a busy machine takes its time for a daemon's start
        )


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with work_directory() as directory:
        yield RunningNode(directory)


# Watching


def test_what_anybody_stores_evicts_and_drops_is_told(node: RunningNode) -> None:
    with node.daemon(), Watcher(node.socket) as watcher, PatternEngine(node.socket) as other:
        watcher.store(1)
        other.store(2)
        watcher.await_heard(1, CPU, SSD)
        watcher.await_heard(2, CPU, SSD)
        node.await_idle()
        node.drop("cpu")
        watcher.await_heard(1, SSD)
        other.load(2)
        watcher.await_heard(2, CPU, SSD)
        node.await_idle()
        node.drop("cpu", "ssd")
        watcher.await_heard(1)
        watcher.await_heard(2)
        assert watcher.heard.num_starts == 1


def test_another_key_space_is_not_told_and_another_tenant_is(node: RunningNode) -> None:
    foreign, salted = key_space('{"other":1}'), tenant_digest("alice")
    with (
        node.daemon(),
        Watcher(node.socket) as watcher,
        Watcher(node.socket, foreign) as stranger,
        Watcher(node.socket, tenant=salted) as alice,
    ):
        alice.store(3)
        stranger.store(3)
        alice.await_heard(3, CPU, SSD)
        stranger.await_heard(3, CPU, SSD)
        salted_chain = set(alice.chain(3, 4))
        await_true(lambda: watcher.heard.blocks(CPU) == salted_chain, "everybody is told")
        assert alice.heard.blocks(CPU) == salted_chain
        assert stranger.heard.blocks(CPU) == set(stranger.chain(3, 4))


def test_a_daemon_that_dies_has_nothing_and_one_that_starts_tells_its_disk(
    node: RunningNode,
) -> None:
    with node.daemon() as daemon, Watcher(node.socket) as watcher:
        watcher.store(4, 300)
        watcher.await_heard(4, CPU, SSD, num_blocks=300)
        node.await_idle()
        daemon.kill()
        watcher.await_heard(4, num_blocks=300)
        with node.daemon():
            watcher.await_heard(4, SSD, num_blocks=300)


def test_a_daemon_that_hangs_goes_on_where_it_was(node: RunningNode) -> None:
    with node.daemon() as daemon, Watcher(node.socket) as watcher:
        watcher.store(5)
        watcher.await_heard(5, CPU, SSD)
        with daemon.stopped():
            assert watcher.hears(5, CPU, SSD)
        node.await_idle()
        node.drop("cpu")
        watcher.await_heard(5, SSD)


def test_one_whose_ears_break_is_told_that_nothing_is_known_and_is_served(
    node: RunningNode,
) -> None:
    class Deaf(ResidencyModel):
        def __call__(self, changes: Sequence[ResidencyChange]) -> None:
            if any(change.tier is SSD for change in changes):
                raise RuntimeError("a bug")
            super().__call__(changes)

    with node.daemon() as daemon, Watcher(node.socket, hear=Deaf()) as watcher:
        watcher.store(7)
        await_true(lambda: watcher.heard.num_starts > 1, "nothing is known any more")
        assert not watcher.heard.blocks(CPU)
        session = watcher.client.session
        assert watcher.load(7) == (["cpu"] * 4, "complete")
        assert watcher.client.session == session, "the link is as good as before"
        assert daemon.stop() == 0


def test_a_watcher_does_not_keep_a_daemon_from_stopping(node: RunningNode) -> None:
    with node.daemon() as daemon, Watcher(node.socket) as watcher:
        watcher.store(6)
        watcher.await_heard(6, CPU, SSD)
        start_s = time.monotonic()
        daemon.stop()
        assert time.monotonic() - start_s < 15, "not until its grace is over"
        watcher.await_heard(6)


def test_one_who_does_not_listen_is_told_the_truth_once_it_does(node: RunningNode) -> None:
    """Far more happens than may wait for it, or fits between two sockets."""
    with node.daemon(), Watcher(node.socket) as engine:
        channel = grpc.insecure_channel(f"unix:{node.socket}")
        stub = engine_pb2_grpc.EngineStub(channel)
        with channel, PatternEngine(node.socket) as deaf:
            told: Any = stub.Watch(pb.WatchRequest(session=deaf.client.session), timeout=60)
            for prompt in range(10, 30):
                engine.store(prompt, 400)
            assert engine.ask(29, 400).tiers, "the daemon is there for others"
            num_blocks = node.await_idle()["tiers"]["cpu"]["blocks"]
            await_true(lambda: len(engine.heard.blocks(CPU)) == num_blocks, "who listens knows all")
            heard = ResidencyModel()
            for changes in told:
                heard([change_from_wire(change) for change in changes.changes])
                if heard.blocks(CPU) == engine.heard.blocks(CPU):
                    break
            told.cancel()


def test_who_is_not_registered_or_watches_already_is_refused(node: RunningNode) -> None:
    with node.daemon(), Watcher(node.socket) as watcher:
        await_true(lambda: watcher.heard.num_starts == 1, "it watches")
        with grpc.insecure_channel(f"unix:{node.socket}") as channel:
            stub = engine_pb2_grpc.EngineStub(channel)
            for session, code in (
                ("nobody", grpc.StatusCode.UNAUTHENTICATED),
                (watcher.client.session, grpc.StatusCode.RESOURCE_EXHAUSTED),
            ):
                with pytest.raises(grpc.RpcError) as refused:
                    list(stub.Watch(pb.WatchRequest(session=session), timeout=20))
                assert refused.value.code() is code
            with pytest.raises(grpc.RpcError, match="register first"):
                stub.Clear(pb.ClearRequest(session="nobody"), timeout=20)


# Clearing


def test_a_key_space_is_cleared_in_every_tier_for_good(node: RunningNode) -> None:
    redis_directory = node.directory / "redis"
    redis_directory.mkdir()
    redis = RedisServer(redis_directory)
    with redis.start():
        node.settings |= {"remote.url": redis.url}
        with (
            node.daemon() as daemon,
            Watcher(node.socket) as ours,
            Watcher(node.socket, tenant=tenant_digest("alice")) as salted,
            Watcher(node.socket, key_space('{"other":1}')) as other,
        ):
            everyone = (ours, salted, other)
            for each in everyone:
                each.store(1)
                each.await_heard(1, CPU, SSD, REMOTE)
            assert ours.client.clear(10) == ""
            assert [each.lookup(1)[0] for each in everyone] == [[], [], ["cpu"] * 4]
            ours.await_heard(1)
            salted.await_heard(1)
            assert other.hears(1, CPU, SSD, REMOTE)
            assert ours.store(1) == 4, "what comes later stays"
            assert ours.client.clear(10) == ""
            daemon.stop()
            with node.daemon():
                for each in everyone:
                    assert each.client.wait_attached(30)
                assert [each.lookup(1)[0] for each in everyone] == [[], [], ["ssd"] * 4]


def test_a_store_under_way_does_not_come_back_after_a_clear(node: RunningNode) -> None:
    with node.daemon(), Watcher(node.socket) as engine:
        payloads = engine.payloads(2, 4)
        said: list[str] = []

        def fill(indexes: Sequence[int], slots: Sequence[memoryview]) -> Generator[None]:
            said.append(engine.client.clear(2))
            for index, slot in zip(indexes, slots, strict=True):
                slot[:] = payloads[index]
                yield

        assert engine.client.store(engine.tenant, engine.chain(2, 4), 0, fill) == 0
        assert said == ["cpu: 4 blocks are in use"]
        assert engine.lookup(2) == ([], "absent")
        node.await_idle()
        assert engine.hears(2)


def test_a_clear_waits_no_longer_than_it_is_told(node: RunningNode) -> None:
    with node.daemon() as daemon, Watcher(node.socket) as engine:
        engine.store(3)
        with daemon.stopped():
            start_s = time.monotonic()
            with pytest.raises(DaemonSlow):
                engine.client.clear(0.5)
            assert time.monotonic() - start_s < 5
        daemon.kill()
        await_true(lambda: not engine.client.is_attached, "it notices")
        with pytest.raises(DaemonUnavailable):
            engine.client.clear(0.5)
