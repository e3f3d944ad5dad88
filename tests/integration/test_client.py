"""The client against a real daemon: identity, sharing, refusals, and engines that die or hang."""

import os
import resource
import sys
import textwrap
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import pytest

from kvtier.client import Client, ClientDeadlines
from kvtier.client.link import open_link
from kvtier.client.types import OwnTier
from kvtier.core.identity import NO_TENANT, KeySpace, hash_blocks, tenant_digest
from kvtier.core.limits import CHAIN_BLOCKS_MAX, SESSIONS_MAX
from kvtier.errors import DaemonUnavailable, RegistrationRefused
from kvtier.testing.child import Child, await_true, work_directory
from kvtier.testing.running_node import RunningNode
from kvtier.tiers.base import Removed
from kvtier.transfer.shm import attach
from kvtier.v1 import engine_pb2 as pb
from kvtier.v1 import engine_pb2_grpc
from kvtier.wire.convert import PROTOCOL
from tests.integration.pattern import (
    BLOCK_BYTES,
    PatternEngine,
    in_threads,
    key_space,
    num_arenas,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningNode]:
    """One daemon for all tests that leave it as it was."""
    with work_directory() as directory:
        node = RunningNode(directory, {"cpu.capacity": "32MiB"})
        with node.daemon():
            yield node


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with work_directory() as directory:
        yield RunningNode(directory)


# Identity


def test_what_is_stored_comes_back(shared: RunningNode) -> None:
    with PatternEngine(shared.socket) as engine:
        before = shared.stat()["lookup_blocks"]
        assert engine.lookup(1) == ([], "absent")
        assert engine.store(1) == 4
        assert engine.lookup(1) == (["cpu"] * 4, "complete")
        assert engine.lookup(1, 6) == (["cpu"] * 4, "absent")
        assert engine.load(1) == (["cpu"] * 4, "complete")
        assert engine.load(1, 6, first=2) == (["cpu"] * 2, "absent")
        assert engine.store(1) == 4, "what is there already counts as taken"
        after = shared.await_idle()["lookup_blocks"]
        assert after["hit"]["cpu"] - before["hit"]["cpu"] == 8
        assert after["miss"] - before["miss"] == 6


def test_two_engines_of_one_identity_share(shared: RunningNode) -> None:
    with PatternEngine(shared.socket) as one, PatternEngine(shared.socket) as other:
        one.store(2)
        assert other.load(2) == (["cpu"] * 4, "complete")
        assert one.client.session != other.client.session


@pytest.mark.parametrize(
    ("space", "tenant"),
    [
        (key_space('{"rope_theta":2}'), NO_TENANT),
        (key_space(), tenant_digest("alice")),
        (key_space(block_bytes=2 * BLOCK_BYTES), NO_TENANT),
    ],
    ids=["another model", "another tenant", "another size"],
)
def test_another_identity_never_hits(shared: RunningNode, space: KeySpace, tenant: bytes) -> None:
    with (
        PatternEngine(shared.socket) as owner,
        PatternEngine(shared.socket, space, tenant) as other,
    ):
        owner.store(3)
        assert other.load(3) == ([], "absent")
        assert other.store(3) == 4
        assert other.load(3) == (["cpu"] * 4, "complete")
        assert owner.load(3) == (["cpu"] * 4, "complete")


def test_the_right_hashes_of_another_tenant_are_a_miss(shared: RunningNode) -> None:
    """Who knows the hashes of others still has to be who stored them."""
    with PatternEngine(shared.socket) as owner, PatternEngine(shared.socket) as thief:
        owner.store(4)
        hashes = owner.chain(4, 4)
        stolen = thief.client.lookup(tenant_digest("thief"), hashes, 0)
        assert (stolen.tiers, stolen.reason) == ((), "identity")
        assert list(thief.client.load(tenant_digest("thief"), hashes, 0)) == ["identity"]
        with PatternEngine(shared.socket, key_space('{"other":1}')) as foreign:
            found = foreign.client.lookup(NO_TENANT, hashes, 0)
            assert (found.tiers, found.reason) == ((), "identity")
            assert list(foreign.client.load(NO_TENANT, hashes, 0)) == ["identity"]


# Arena contents that change


def checksum_misses(node: RunningNode) -> float:
    return node.metric("kvtier_miss_blocks_total", tier="cpu", reason="checksum")


def test_a_block_scribbled_over_in_the_arena_is_served_to_nobody(shared: RunningNode) -> None:
    with PatternEngine(shared.socket) as engine, PatternEngine(shared.socket) as other:
        engine.store(5, 4)
        shared.await_idle()
        shared.drop("ssd")
        slots: list[memoryview] = []
        assert engine.load(5, 4, on_block=lambda block: slots.append(block.payload))[1]
        slots[2][100] ^= 1  # long after its lease ended: a client may do that, it maps the arena
        misses = checksum_misses(shared)
        assert other.load(5, 4) == (["cpu"] * 2, "corrupt")
        assert (
            shared.metric("kvtier_miss_blocks_total", tier="cpu", reason="checksum") == misses + 1
        )
        assert other.lookup(5, 4) == (["cpu"] * 2, "absent")
        assert other.store(5, 4) == 4, "it may be stored again at once"
        assert other.load(5, 4) == (["cpu"] * 4, "complete")
        assert shared.await_idle()["pins"] == 0


def test_a_block_that_is_not_what_its_checksum_says_never_spreads(shared: RunningNode) -> None:
    with PatternEngine(shared.socket) as engine:
        shared.await_idle()
        shared.drop("cpu", "ssd")
        link = open_link(shared.socket, engine.space, "liar")
        chain = pb.Chain(tenant=NO_TENANT, hashes=b"".join(engine.chain(6, 4)))
        with stub_of(shared) as stub:
            granted = stub.PrepareStore(
                pb.PrepareStoreRequest(session=link.session, chain=chain), timeout=20
            )
            assert len(granted.indexes) == 4
            complete = pb.CompleteStoreRequest(
                session=link.session, lease=granted.lease, checksums=bytes(64)
            )
            assert stub.CompleteStore(complete, timeout=20).stored_blocks == 4
        tiers = shared.await_idle()["tiers"]
        assert tiers["ssd"]["blocks"] == 0
        assert tiers["cpu"]["blocks"] == 0
        assert engine.load(6, 4) == ([], "absent")
        assert engine.store(6, 4) == 4
        assert engine.load(6, 4) == (["cpu"] * 4, "complete")
        link.close()


def test_a_store_whose_copy_fails_leaves_no_trace(shared: RunningNode) -> None:
    with PatternEngine(shared.socket) as engine:

        def fail(indexes: Sequence[int], _slots: Sequence[memoryview]) -> Generator[None]:
            for index in indexes:
                if index == 2:
                    raise ValueError("the engine's memory is gone")
                yield

        with pytest.raises(ValueError, match="gone"):
            engine.client.store(NO_TENANT, engine.chain(7, 4), 0, fail)
        assert engine.lookup(7) == ([], "absent")
        assert shared.await_idle()["pins"] == 0
        assert engine.store(7) == 4


# Refusals


class stub_of:  # noqa: N801 - reads as a function
    """The raw calls, for clients that do not keep to the protocol."""

    def __init__(self, node: RunningNode) -> None:
        self._channel = grpc.insecure_channel(f"unix:{node.socket}")

    def __enter__(self) -> engine_pb2_grpc.EngineStub:
        return engine_pb2_grpc.EngineStub(self._channel)

    def __exit__(self, *_: object) -> None:
        self._channel.close()


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (key_space(name="striped"), "layout 'striped' version 1 is not known"),
        (key_space(block_bytes=2 << 20), "raise cpu.slab"),
        (key_space(block_bytes=1 << 32), "layout.block_bytes is 4294967296; the maximum is"),
    ],
    ids=["layout", "block too large", "block too large for any slab"],
)
def test_a_registration_that_cannot_be_served(
    shared: RunningNode, space: KeySpace, said: str
) -> None:
    with pytest.raises(RegistrationRefused, match=said):
        open_link(shared.socket, space, "pattern")
    await_true(lambda: not engines_named(shared, "pattern"), "no session is left")


def engines_named(node: RunningNode, name: str) -> list[object]:
    return [engine for engine in node.stat()["engines"] if engine["engine"] == name]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"protocol": PROTOCOL + 1}, "upgrade kvtier in the daemon"),
        ({"protocol": 0}, "upgrade kvtier in the engine"),
        ({"proof": bytes(32)}, "cannot access the daemon's shared memory"),
        ({"ticket": b"another"}, "cannot access the daemon's shared memory"),
        ({"ticket": b"\xff\xfe"}, "cannot access the daemon's shared memory"),
        ({"key_space": b"short"}, "key_space has 5 bytes"),
        ({"layout": pb.Layout(name="paged", version=1)}, "must be positive"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_handshake_that_proves_nothing(
    shared: RunningNode, changes: dict[str, object], said: str
) -> None:
    attachment = attach(shared.socket, 5)
    layout = pb.Layout(
        name="paged", version=1, block_tokens=4, block_bytes=BLOCK_BYTES, dtype="float32"
    )
    fields: dict[str, object] = {
        "protocol": PROTOCOL,
        "ticket": attachment.ticket.encode(),
        "proof": attachment.proof,
        "key_space": bytes(16),
        "layout": layout,
        "engine": "raw",
    }
    with stub_of(shared) as stub:
        with pytest.raises(grpc.RpcError) as caught:
            stub.Register(pb.RegisterRequest(**(fields | changes)), timeout=20)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert said in caught.value.details()
    attachment.close()


def test_calls_that_make_no_sense_are_refused(shared: RunningNode) -> None:
    with PatternEngine(shared.socket) as engine, stub_of(shared) as stub:
        session = engine.client.session
        wrong = {
            "hash cut": pb.LookupRequest(
                session=session, chain=pb.Chain(tenant=NO_TENANT, hashes=bytes(17))
            ),
            "tenant cut": pb.LookupRequest(
                session=session, chain=pb.Chain(tenant=b"me", hashes=bytes(16))
            ),
            "first beyond": pb.LookupRequest(
                session=session, chain=pb.Chain(tenant=NO_TENANT, hashes=bytes(16)), first=2
            ),
            "too long": pb.LookupRequest(
                session=session,
                chain=pb.Chain(tenant=NO_TENANT, hashes=bytes(16 * (CHAIN_BLOCKS_MAX + 1))),
            ),
        }
        for name, request in wrong.items():
            with pytest.raises(grpc.RpcError) as caught:
                stub.Lookup(request, timeout=20)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name
        with pytest.raises(grpc.RpcError) as caught:
            stub.Lookup(pb.LookupRequest(session="nobody"), timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.RpcError) as caught:
            stub.CompleteStore(
                pb.CompleteStoreRequest(session=session, lease=1, checksums=bytes(15)), timeout=20
            )
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert engine.store(8) == 4, "the daemon goes on"


def test_a_prompt_of_a_million_tokens(shared: RunningNode) -> None:
    with PatternEngine(shared.socket) as engine:
        engine.store(9, 4)
        hashes = engine.chain(9, 4)
        hashes += hash_blocks(hashes[-1], list(range(4 * (CHAIN_BLOCKS_MAX - 4))), 4)
        assert len(hashes) == CHAIN_BLOCKS_MAX
        found = engine.client.lookup(NO_TENANT, hashes, 0)
        assert ([*found.tiers], found.reason) == (["cpu"] * 4, "absent")
        copied: list[int] = []

        def fill(indexes: Sequence[int], slots: Sequence[memoryview]) -> Generator[None]:
            for index, slot in zip(indexes, slots, strict=True):
                slot[:] = bytes(len(slot))
                copied.append(index)
                yield

        taken = engine.client.store(NO_TENANT, hashes, 0, fill)
        assert taken == 4 + len(copied), "as much as one engine may hold at once, as a prefix"
        assert copied == list(range(4, taken))
        assert 0 < len(copied) * BLOCK_BYTES <= 32 << 20
        items = list(engine.client.load(NO_TENANT, hashes, 0))
        assert items[-1] == "absent"
        assert len(items) == taken + 1
        assert shared.await_idle(20)["pins"] == 0


def test_as_many_engines_as_there_may_be(node: RunningNode) -> None:
    with node.daemon() as daemon, ExitStack() as engines:
        crowd = [engines.enter_context(PatternEngine(node.socket)) for _ in range(SESSIONS_MAX)]
        with pytest.raises(DaemonUnavailable, match="no room for another client"):
            open_link(node.socket, key_space(), "one too many")
        in_threads([lambda e=engine, i=i: e.store(i, 2) for i, engine in enumerate(crowd)])
        in_threads([lambda e=engine, i=i: e.load(63 - i, 2) for i, engine in enumerate(crowd)])
        status = node.await_idle(30)
        assert len(status["engines"]) == SESSIONS_MAX
        crowd[0].client.close()
        await_true(lambda: len(node.stat()["engines"]) == SESSIONS_MAX - 1, "one has left")
        late = engines.enter_context(PatternEngine(node.socket))
        assert late.load(5, 2) == (["cpu"] * 2, "complete")
        assert daemon.is_running


# Clients that die or hang

_VICTIM = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from kvtier.client import ClientDeadlines
from tests.integration.pattern import PatternEngine

def hang(*_):
    print("holding", flush=True)
    sys.stdin.read()  # nobody writes, nobody closes: until the end
    import signal
    signal.pause()

with PatternEngine(Path({socket!r}), deadlines=ClientDeadlines(5, 2, 5, 0.1)) as engine:
    if {what!r} == "store":
        engine.client.store(engine.tenant, engine.chain(20, 8), 0, hang)
    else:
        engine.load(21, 8, on_block=hang)
"""


def victim(node: RunningNode, what: str) -> Child:
    """Start a client that holds a lease and does not let go."""
    source = _VICTIM.format(root=str(Path(__file__).parents[2]), socket=str(node.socket), what=what)
    log_path = node.directory / f"victim.{what}.log"
    child = Child([sys.executable, "-c", textwrap.dedent(source)], log_path)
    child.await_log("holding")
    return child


@pytest.mark.parametrize("what", ["store", "load"])
def test_a_killed_client_lets_go_of_everything(shared: RunningNode, what: str) -> None:
    with PatternEngine(shared.socket) as engine:
        engine.store(21, 8)
        idle = shared.await_idle()["tiers"]["cpu"]["used_bytes"]
        with victim(shared, what) as child:
            held = shared.stat()
            assert held["leases"] == 1
            assert held["pins"] == (8 if what == "load" else 0)
            assert [e["pid"] for e in held["engines"]].count(child.pid) == 1
            start_s = time.monotonic()
            child.kill()
            status = shared.await_idle()
            print(f"free again after {time.monotonic() - start_s:.3f} s")
        assert status["tiers"]["cpu"]["used_bytes"] == idle, "its slots are free again"
        assert child.pid not in [e["pid"] for e in status["engines"]]
        assert engine.lookup(20, 8) == ([], "absent"), "half a store is none"
        assert engine.store(20, 8) == 8
        assert engine.load(20, 8) == (["cpu"] * 8, "complete")
        shared.await_idle()
        shared.drop("cpu", "ssd")


def test_a_client_that_hangs_loses_its_lease_and_holds_up_nobody(node: RunningNode) -> None:
    with node.daemon(daemon__lease="300ms"), ExitStack() as stack:
        quick = ClientDeadlines(5, 2, 5, 0.1)
        engine = stack.enter_context(PatternEngine(node.socket))
        hung = stack.enter_context(PatternEngine(node.socket, deadlines=quick))
        engine.store(30, 8)
        node.await_idle()
        blocks = hung.client.load(hung.tenant, hung.chain(30, 8), 0)
        next(blocks)
        assert node.stat()["pins"] == 8
        assert node.await_idle()["leases"] == 0, "its time was up"
        assert engine.load(30, 8) == (["cpu"] * 8, "complete")
        with pytest.raises(DaemonUnavailable, match="lease ran out"):
            next(blocks)
        assert hung.client.wait_attached(30)


def test_a_stopped_client_process_loses_its_lease(node: RunningNode) -> None:
    with node.daemon(daemon__lease="300ms"), PatternEngine(node.socket) as engine:
        engine.store(21, 8)
        node.await_idle()
        with victim(node, "load") as child, child.stopped():
            assert engine.load(21, 8) == (["cpu"] * 8, "complete")
            assert node.await_idle(15)["pins"] == 0


def test_a_daemon_stops_although_a_client_hangs(node: RunningNode) -> None:
    with node.daemon() as daemon, PatternEngine(node.socket) as engine:
        engine.store(21, 8)
        with (
            victim(node, "load") as loading,
            victim(node, "store") as storing,
            loading.stopped(),
            storing.stopped(),
        ):
            start_s = time.monotonic()
            assert daemon.stop() == 0
            print(f"stopped after {time.monotonic() - start_s:.2f} s")
    with node.daemon(), PatternEngine(node.socket) as engine:
        assert engine.load(21, 8) == (["ssd"] * 8, "complete")


# Daemons that die or hang


def test_a_daemon_that_comes_back_is_joined_again(node: RunningNode) -> None:
    daemon = node.daemon()
    with daemon, PatternEngine(node.socket) as engine:
        engine.store(40)
        node.await_idle()
        session = engine.client.session
        daemon.kill()
        await_true(lambda: not engine.client.is_attached, "its end is noticed")
        start_s = time.monotonic()
        for call in (engine.lookup, engine.load, engine.store):
            with pytest.raises(DaemonUnavailable):
                call(40)
        assert time.monotonic() - start_s < engine.deadlines.lookup_s, "calls fail at once"
        with node.daemon():
            assert engine.client.wait_attached(30)
            assert engine.client.session != session
            assert engine.load(40) == (["ssd"] * 4, "complete")
            assert engine.store(41) == 4


def test_a_daemon_killed_during_a_load(node: RunningNode) -> None:
    with node.daemon() as daemon, PatternEngine(node.socket) as engine:
        engine.store(42, 64)
        blocks = engine.client.load(engine.tenant, engine.chain(42, 64), 0)
        first = next(blocks)
        daemon.kill()
        assert not isinstance(first, str)
        assert first.payload == engine.payloads(42, 1)[0], "the mapping outlives the daemon"
        start_s = time.monotonic()
        with suppress(DaemonUnavailable):
            list(blocks)
        assert time.monotonic() - start_s < 5
        with node.daemon():
            assert engine.client.wait_attached(30)
            tiers, _ = engine.load(42, 64)
            print(f"{len(tiers)} blocks had reached the SSD")


@pytest.mark.parametrize("what", ["lookup", "load", "store"])
def test_a_daemon_that_stands_still_costs_one_deadline(node: RunningNode, what: str) -> None:
    limit_s, others_s = 0.5, 10.0
    waits = {name: limit_s if name == what else others_s for name in ("lookup", "load", "store")}
    deadlines = ClientDeadlines(*waits.values(), reconnect_s=2.0)
    with node.daemon() as daemon, PatternEngine(node.socket, deadlines=deadlines) as engine:
        engine.store(43)
        calls: dict[str, Callable[[int], object]] = {
            "lookup": engine.lookup,
            "load": engine.load,
            "store": engine.store,
        }
        with daemon.stopped():
            start_s = time.monotonic()
            with pytest.raises(DaemonUnavailable):
                calls[what](43 if what != "store" else 44)
            took_s = time.monotonic() - start_s
            print(f"{what} ended after {took_s:.2f} s")
            assert limit_s <= took_s < others_s / 2
            start_s = time.monotonic()
            for call in calls.values():
                with pytest.raises(DaemonUnavailable):
                    call(43)
            assert time.monotonic() - start_s < others_s / 2, "the next ones do not wait"

        def works() -> bool:
            with suppress(DaemonUnavailable):
                return engine.load(43) == (["cpu"] * 4, "complete") and engine.store(44) == 4
            return False

        await_true(works, "the client uses the daemon again")
        assert node.await_idle()["pins"] == 0


@pytest.mark.parametrize("fault", [TimeoutError(), RuntimeError("a bug")])
def test_an_engine_that_did_not_empty_its_tier_is_asked_again(
    shared: RunningNode, fault: Exception
) -> None:
    is_busy = True

    def drop() -> Removed:
        if is_busy:
            raise fault
        return Removed(3, 300)

    client = Client(shared.socket, key_space(), "busy", drop=drop)
    client.start()
    try:
        assert client.wait_attached(30)
        (late,) = shared.drop_now("gpu", deadline_ms=500)
        assert "no answer" in late.keeping[0].why
        is_busy = False
        (done,) = shared.drop_now("gpu", deadline_ms=8000)
        assert (done.blocks, done.bytes, done.error) == (3, 300, "")
    finally:
        client.close()


def test_an_engine_that_could_not_tell_of_its_tier_tells_of_it_later(shared: RunningNode) -> None:
    faults = [RuntimeError("a bug"), KeyError("another")]

    def own_tier() -> OwnTier:
        if faults:
            raise faults.pop()
        return OwnTier(1000, 777, 7, 0)

    deadlines = ClientDeadlines(reconnect_s=0.01)
    client = Client(shared.socket, key_space(), "late", deadlines=deadlines, own_tier=own_tier)
    client.start()
    try:
        assert client.wait_attached(30)

        def told() -> bool:
            return 777 in (each["gpu_used_bytes"] for each in shared.stat()["engines"])

        await_true(told, "its reports go on")
    finally:
        client.close()


def test_an_arena_that_outlives_its_daemon_goes_with_its_last_copy(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvtier.client.keeper._CLOSE_TIMEOUT_S", 0.05)
    num_before = num_arenas()
    with node.daemon() as daemon, PatternEngine(node.socket) as engine:
        assert engine.store(48, 8) == 8
        blocks = engine.client.load(engine.tenant, engine.chain(48, 8), 0)
        payload = getattr(next(blocks), "payload", b"")
        before = bytes(payload)
        daemon.kill()
        await_true(lambda: "the arena is in use still" in caplog.text, "a copy is under way")
        with node.daemon():
            assert engine.client.wait_attached(30), "which holds up no later session"
            assert engine.store(48, 8) == 8
            assert bytes(payload) == before
            assert num_arenas() == num_before + 2
            del payload
            blocks.close()
            await_true(lambda: num_arenas() == num_before + 1, "its memory is free again")
    await_true(lambda: num_arenas() == num_before, "and that of the other")


def test_a_client_closes_whatever_the_daemon_does(node: RunningNode) -> None:
    with node.daemon() as daemon, PatternEngine(node.socket) as engine:
        engine.store(45)
        with daemon.stopped():
            start_s = time.monotonic()
            engine.client.close()
            assert time.monotonic() - start_s < 6
        await_true(lambda: not node.stat()["engines"], "the session is over")


def test_a_daemon_that_ran_out_of_descriptors_lets_engines_in_again(node: RunningNode) -> None:
    with node.daemon() as daemon:
        limits = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (0, limits[1]))
        with pytest.raises(DaemonUnavailable):
            attach(node.socket, 0.1)
        daemon.await_log("cannot accept clients")
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, limits)
        with PatternEngine(node.socket) as engine:
            assert engine.store(47) == 4
        assert daemon.stop() == 0


def test_no_client_leaves_descriptors_behind(node: RunningNode) -> None:
    def descriptors(pid: int | str) -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    with node.daemon() as daemon:
        for _ in range(3):  # the first ones also open what stays open
            with PatternEngine(node.socket) as engine:
                engine.store(46)
        before = descriptors(daemon.pid)
        for _ in range(10):
            with PatternEngine(node.socket) as engine:
                engine.load(46)
        await_true(lambda: descriptors(daemon.pid) <= before, "all of them are closed")
        assert daemon.stop() == 0
