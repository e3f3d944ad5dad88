"""The real daemon on a disk that fails, with requests running.

Whatever the disk does: no wrong byte, every call ends by its deadline, the other tiers serve, the
status says what is wrong, and the tier is in use again within seconds of its recovery.
"""

import errno
import time
from collections.abc import Iterator, Mapping

import pytest

from kvtier.testing.child import Child, await_true, work_directory
from kvtier.testing.running_node import RunningNode
from tests.integration.pattern import PatternEngine
from tests.integration.redis_child import RedisServer
from tests.integration.traffic import DEADLINES, Traffic
from tests.shim.storage import Action, Call, Fault, StorageShim, block, delay, fail

pytestmark = pytest.mark.slow

SMALL = {
    "cpu.capacity": "2MiB",
    "cpu.slab": "256KiB",
    "ssd.capacity": "6MiB",
    "ssd.segment": "1MiB",
    "ssd.deadline": "1s",
    "daemon.stop_grace": "6s",
}
"""Neither tier holds the prompts of the traffic: both are read, written and evict all the time."""

BACK_S = 20.0
"""Within seconds of its recovery a tier is in use again, also on a busy machine."""

FULL = {
    Call.ALLOCATE: fail(errno.ENOSPC),
    Call.WRITE: fail(errno.ENOSPC),
    Call.STATVFS: Fault(Action.FILL),
}
READ_ONLY = {
    call: fail(errno.EROFS)
    for call in (Call.OPEN_WRITE, Call.WRITE, Call.ALLOCATE, Call.TRUNCATE, Call.UNLINK)
}
HANGING = {call: block() for call in Call}


@pytest.fixture
def disk() -> Iterator[tuple[RunningNode, StorageShim]]:
    with work_directory() as directory, StorageShim(directory / "ssd", directory) as shim:
        yield RunningNode(directory, SMALL, shim.environment), shim


def in_use_again(node: RunningNode, traffic: Traffic) -> None:
    """Wait until the tier is written and read again, by the daemon's account and the clients'."""
    start_s = time.monotonic()
    node.await_state("ssd", "up", timeout_s=BACK_S)
    node.await_moved("cpu_to_ssd", BACK_S)
    traffic.await_loaded("ssd", BACK_S)
    print(f"in use again after {time.monotonic() - start_s:.2f} s")


def tier_of(node: RunningNode) -> Mapping[str, str]:
    document: Mapping[str, str] = node.stat()["tiers"]["ssd"]
    return document


def ended_well(node: RunningNode) -> None:
    status = node.await_idle(20)
    assert (status["pins"], status["leases"]) == (0, 0)
    assert node.metric("kvtier_miss_blocks_total", reason="identity") == 0


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param({Call.READ: delay(20)}, id="slow reads"),
        pytest.param({Call.WRITE: delay(20)}, id="slow writes"),
        pytest.param({Call.READ: Fault(Action.SHORTEN)}, id="short reads"),
        pytest.param({Call.WRITE: Fault(Action.SHORTEN)}, id="short writes"),
        pytest.param({Call.READ: fail(errno.EIO, every=7)}, id="some reads fail"),
        pytest.param({Call.WRITE: fail(errno.EIO, every=7)}, id="some writes fail"),
        pytest.param({Call.READ: Fault(Action.FLIP, every=5)}, id="flipped bits"),
        pytest.param({Call.WRITE: Fault(Action.TEAR, every=5)}, id="torn writes"),
        pytest.param({Call.SYNC: Fault(Action.LIE)}, id="a sync that lies"),
        pytest.param({Call.SYNC: fail(errno.EIO)}, id="a sync that fails"),
        pytest.param({Call.OPEN_READ: fail(errno.EMFILE, every=3)}, id="too many open files"),
        pytest.param({Call.UNLINK: fail(errno.EIO, every=2)}, id="files that stay"),
    ],
)
def test_a_disk_that_is_bad_at_times(
    disk: tuple[RunningNode, StorageShim], faults: Mapping[Call, Fault]
) -> None:
    node, shim = disk
    with node.daemon() as daemon:
        with Traffic(node, seed=100) as traffic:
            traffic.await_loaded("ssd")
            with shim.suffering(faults):
                strikes = sum(map(shim.num_faults, faults)) + 10
                await_true(lambda: sum(map(shim.num_faults, faults)) > strikes, "it hurts", 20)
                traffic.await_loaded("cpu")
            in_use_again(node, traffic)
        ended_well(node)
        assert "Traceback" not in daemon.log
        assert daemon.stop() == 0


@pytest.mark.parametrize(
    ("faults", "states", "reason"),
    [
        pytest.param(
            {Call.READ: fail(errno.EIO), Call.OPEN_READ: fail(errno.EIO)},
            ("out",),
            "error",
            id="no read succeeds",
        ),
        pytest.param({Call.WRITE: fail(errno.EIO)}, ("out", "degraded"), "error", id="no write"),
        pytest.param(FULL, ("degraded",), "read-only", id="full"),
        pytest.param(READ_ONLY, ("out", "degraded"), "read-only", id="mounted read-only"),
        pytest.param(HANGING, ("out",), "answer", id="hanging"),
    ],
)
def test_a_disk_that_is_gone_for_a_while(
    disk: tuple[RunningNode, StorageShim],
    faults: Mapping[Call, Fault],
    states: tuple[str, ...],
    reason: str,
) -> None:
    node, shim = disk
    with node.daemon() as daemon:
        with Traffic(node, seed=200) as traffic:
            traffic.await_loaded("ssd")
            with shim.suffering(faults):
                said = node.await_state("ssd", *states)
                print(f"the status says: {said}")
                assert reason in said.lower()
                traffic.await_loaded("cpu")
            in_use_again(node, traffic)
        ended_well(node)
        assert "Traceback" not in daemon.log
        assert daemon.stop() == 0


@pytest.mark.parametrize(
    ("faults", "states", "reason"),
    [
        pytest.param(FULL, ("degraded",), "read-only", id="full"),
        pytest.param(READ_ONLY, ("out", "degraded"), "read-only", id="mounted read-only"),
        pytest.param({Call.OPEN_WRITE: fail(errno.EIO)}, ("out",), "error", id="no write"),
        pytest.param({Call.OPEN_WRITE: fail(errno.ENOSPC)}, ("out",), "space", id="no inodes"),
        pytest.param({Call.OPEN_WRITE: fail(errno.EACCES)}, ("out",), "denied", id="not writable"),
        pytest.param(HANGING, ("out",), "opened", id="hanging"),
    ],
)
def test_a_daemon_starts_on_a_disk_that_is_gone_for_a_while(
    disk: tuple[RunningNode, StorageShim],
    faults: Mapping[Call, Fault],
    states: tuple[str, ...],
    reason: str,
) -> None:
    node, shim = disk
    with node.daemon(), Traffic(node, seed=110) as traffic:
        traffic.await_loaded("ssd")
    with shim.suffering(faults), node.daemon() as daemon, Traffic(node, seed=110) as traffic:
        await_true(lambda: tier_of(node)["state"] in states, "it is told", 20)
        assert reason in tier_of(node)["reason"].lower()
        traffic.await_loaded("cpu")
        shim.clear()
        in_use_again(node, traffic)
        assert "Traceback" not in daemon.log
        assert daemon.stop() == 0


def test_a_daemon_that_requires_its_disk_does_not_start_without_it(
    disk: tuple[RunningNode, StorageShim],
) -> None:
    node, shim = disk
    with (
        shim.suffering({Call.OPEN_WRITE: fail(errno.EIO)}),
        node.start("serve", ssd__required="true") as daemon,
    ):
        assert daemon.wait(20) == 2
    assert "ssd.directory" in daemon.log


def test_a_full_volume_keeps_what_it_has(disk: tuple[RunningNode, StorageShim]) -> None:
    node, shim = disk
    with node.daemon(ssd__capacity="32MiB"), PatternEngine(node.socket) as engine:
        for prompt in range(40):
            engine.store(prompt, 8)
        node.await_idle()
        with shim.suffering(FULL):
            for prompt in range(40, 80):
                engine.store(prompt, 8)
            node.await_state("ssd", "degraded")
            await_true(lambda: node.metric("kvtier_ssd_read_only") == 1, "a gauge says it")
            node.await_idle()
            node.drop("cpu")
            came = [engine.load(prompt, 8)[0] for prompt in range(40)]
            whole = came.count(["ssd"] * 8)
            print(f"{whole} of 40 prompts are still there")
            assert whole >= 20, "a volume that others fill does not empty the store"
        node.await_state("ssd", "up")
        assert engine.store(70, 8) == 8
        node.await_idle()
        node.drop("cpu")
        assert engine.load(70, 8) == (["ssd"] * 8, "complete")


def test_a_flipped_bit_costs_one_block_and_only_once(disk: tuple[RunningNode, StorageShim]) -> None:
    node, shim = disk
    with node.daemon(ssd__scrub_rate=0), PatternEngine(node.socket) as engine:
        assert engine.store(1, 4) == 4
        node.await_idle()
        node.drop("cpu")

        def damaged() -> bool:
            tiers, end = engine.load(1, 4)
            assert end in {"complete", "failed"}
            node.drop("cpu")
            return len(tiers) < 4

        with shim.suffering({Call.READ: Fault(Action.FLIP)}):
            await_true(damaged, "a flipped bit that is no padding")
        reasons = node.stat()["miss_reasons"]["ssd"]
        assert sum(reasons.get(reason, 0) for reason in ("checksum", "header", "identity")) >= 1
        assert engine.store(1, 4) == 4
        node.await_idle()
        node.drop("cpu")
        assert engine.load(1, 4) == (["ssd"] * 4, "complete")


def test_damage_that_is_found_while_the_rest_is_still_read_is_told(
    disk: tuple[RunningNode, StorageShim],
) -> None:
    """The engine ends its load there; that may not be heard before what it has found."""
    node, shim = disk
    with node.daemon(), PatternEngine(node.socket) as engine:
        assert engine.store(1, 6) == 6
        node.await_idle()
        node.drop("cpu")
        slots: list[memoryview] = []
        engine.load(1, 4, on_block=lambda block: slots.append(block.payload))
        slots[2][100] ^= 1
        slots.clear()
        with shim.suffering({Call.READ: block()}):
            assert engine.load(1, 6) == (["cpu"] * 2, "corrupt")
            assert node.metric("kvtier_miss_blocks_total", tier="cpu", reason="checksum") == 1


@pytest.mark.redis
def test_other_tiers_serve_while_the_disk_hangs() -> None:
    with work_directory() as directory, StorageShim(directory / "ssd", directory) as shim:
        server = RedisServer(directory)
        node = RunningNode(
            directory,
            SMALL | {"remote.url": server.url, "remote.min_tokens": 0, "remote.deadline": "2s"},
            shim.environment,
        )
        with server.start(), node.daemon() as daemon, PatternEngine(node.socket) as engine:
            for prompt in range(3):
                assert engine.store(prompt, 8) == 8
            node.await_idle()
            shim.set(HANGING)
            node.drop_now("cpu")
            engine.load(0, 8)  # finds out
            node.await_state("ssd", "out")
            assert engine.load(1, 8) == (["remote"] * 8, "complete")
            assert engine.store(4, 8) == 8
            assert engine.load(4, 8) == (["cpu"] * 8, "complete")
            assert node.metric("kvtier_tier_up", tier="remote") == 1
            await_true(lambda: node.metric("kvtier_tier_up", tier="ssd") == 0, "a gauge says it")
            assert stopped_within(daemon, 6), "it ends although calls hang"
            assert "Traceback" not in daemon.log


def stopped_within(daemon: Child, grace_s: float) -> bool:
    """Stop a daemon, and tell whether it ended well within its grace."""
    start_s = time.monotonic()
    assert daemon.stop() == 0
    took_s = time.monotonic() - start_s
    print(f"stopped after {took_s:.2f} s")
    return took_s < grace_s + 10


def test_a_block_whose_read_hangs_is_waited_for_once(disk: tuple[RunningNode, StorageShim]) -> None:
    node, shim = disk
    with node.daemon() as daemon, PatternEngine(node.socket, deadlines=DEADLINES) as engine:
        assert engine.store(1, 8) == 8
        node.await_idle()
        node.drop("cpu")
        with shim.suffering({Call.READ: block()}):
            engine.load(1, 8)
            node.await_state("ssd", "out")
            for _ in range(3):
                start_s = time.monotonic()
                tiers, end = engine.load(1, 8)
                took_s = time.monotonic() - start_s
                print(f"{len(tiers)} blocks, {end} after {took_s:.2f} s")
                assert took_s < DEADLINES.load_s, "nobody waits for a disk that is known to hang"
            assert engine.store(2, 4) == 4
            assert engine.load(2, 4) == (["cpu"] * 4, "complete")
        node.await_state("ssd", "up")
        node.await_idle()
        engine.store(1, 8)
        assert engine.load(1, 8)[1] == "complete"
        assert stopped_within(daemon, 6)


def test_a_crash_while_the_disk_hangs(disk: tuple[RunningNode, StorageShim]) -> None:
    node, shim = disk
    with node.daemon() as daemon, PatternEngine(node.socket) as engine:
        engine.store(1, 8)
        node.await_idle()
        shim.set({Call.WRITE: block(), Call.SYNC: block()})
        engine.store(2, 8)
        await_true(lambda: shim.num_waiting(Call.WRITE), "a write hangs")
        daemon.kill()
        shim.clear()
    with node.daemon(), PatternEngine(node.socket) as engine:
        assert engine.load(1, 8) == (["ssd"] * 8, "complete")
        engine.load(2, 8)
        assert engine.store(2, 8) == 8
        assert engine.load(2, 8)[1] == "complete"
