"""What was seen to go wrong in caches of this kind, each tried from outside on a real daemon.

Harm is done to real files and a real server; what must not happen is named by the test.
"""

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.testing.child import Child, await_true, work_directory
from kvtier.testing.running_node import RunningNode, fetch
from tests.integration.pattern import BLOCK_BYTES, PatternEngine
from tests.integration.redis_child import RedisServer
from tests.integration.traffic import Traffic

pytestmark = pytest.mark.slow

MIB = 1 << 20
NUM_PROMPTS = 40
NUM_BLOCKS = 8
"""Of one prompt. All prompts take 3.8 MiB in the SSD tier, four segments."""

UNTOUCHED = {"ssd.segment": "1MiB", "ssd.scrub_rate": 0}
"""Without a scrub a test decides itself when damage is found."""

BACK_S = 20.0


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with work_directory() as directory:
        yield RunningNode(directory, UNTOUCHED)


def ssd_of(node: RunningNode) -> Path:
    return node.directory / "ssd"


def segments(node: RunningNode) -> list[Path]:
    return sorted(ssd_of(node).glob("*.segment"))


def allocated_bytes(directory: Path) -> int:
    """Return what a directory's files take on the disk; a file may go while we look."""
    total = 0
    for entry in os.scandir(directory):
        try:
            total += entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def store_all(node: RunningNode, engine: PatternEngine) -> None:
    for prompt in range(NUM_PROMPTS):
        assert engine.store(prompt, NUM_BLOCKS) == NUM_BLOCKS
    node.await_idle()


def num_from_ssd(node: RunningNode, engine: PatternEngine) -> int:
    """Load every prompt from the SSD tier; ``load`` checks every byte of what comes."""
    node.drop("cpu")
    num_loaded = 0
    for prompt in range(NUM_PROMPTS):
        tiers, _ = engine.load(prompt, NUM_BLOCKS)
        assert set(tiers) <= {"ssd"}
        num_loaded += len(tiers)
    return num_loaded


def all_again(node: RunningNode, engine: PatternEngine) -> None:
    """Store what was lost, and have everything."""
    store_all(node, engine)
    assert num_from_ssd(node, engine) == NUM_PROMPTS * NUM_BLOCKS


def place_of(node: RunningNode, payload: bytes) -> tuple[Path, int]:
    """Return the file and the offset at which a block's bytes are, the latest copy of them."""
    for path in reversed(segments(node)):
        at = path.read_bytes().find(payload)
        if at >= 0:
            return path, at
    raise AssertionError("the block's bytes are in no segment")


def flip_payload_bit(node: RunningNode, payload: bytes) -> None:
    path, at = place_of(node, payload)
    middle = len(payload) // 2
    with path.open("r+b") as file:
        file.seek(at + middle)
        file.write(bytes([payload[middle] ^ 0x10]))


def test_a_flipped_bit_is_a_miss_with_a_reason_and_is_stored_again(node: RunningNode) -> None:
    with node.daemon(), PatternEngine(node.socket) as engine:
        assert engine.store(1, 4) == 4
        node.await_idle()
        node.drop("cpu")
        flip_payload_bit(node, engine.payloads(1, 4)[2])
        tiers, end = engine.load(1, 4)
        assert tiers == ["ssd"] * len(tiers)
        assert len(tiers) <= 2
        assert end != "complete"
        status = node.await_idle()
        assert status["miss_reasons"]["ssd"]["checksum"] == 1
        assert engine.lookup(1, 4)[0] != ["ssd"] * 4, "lookup says no as well"
        assert engine.store(1, 4) == 4
        node.await_idle()
        node.drop("cpu")
        assert engine.load(1, 4) == (["ssd"] * 4, "complete")


def test_fsck_finds_a_flipped_bit_and_repairs_it_for_good(node: RunningNode) -> None:
    with node.daemon() as daemon, PatternEngine(node.socket) as engine:
        store_all(node, engine)
        damaged = engine.payloads(7, NUM_BLOCKS)[3]
        assert daemon.stop() == 0
    assert node.fsck()[0] == 0
    flip_payload_bit(node, damaged)
    code, report = node.fsck()
    print(f"fsck: {report}")
    assert code == 1
    assert node.fsck()[0] == 1, "without --repair it changes nothing"
    assert node.fsck("--repair")[0] == 0
    assert node.fsck()[0] == 0
    with node.daemon(), PatternEngine(node.socket) as engine:
        assert engine.load(7, NUM_BLOCKS)[0] == ["ssd"] * 3
        assert num_from_ssd(node, engine) == NUM_PROMPTS * NUM_BLOCKS - 5, "and the four behind it"
        all_again(node, engine)


def zero(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def scribble(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(os.urandom(path.stat().st_size))


@pytest.mark.parametrize("harm", [zero, truncate, empty, scribble])
def test_a_damaged_file_costs_its_blocks_and_poisons_nothing(
    node: RunningNode, harm: Callable[[Path], None]
) -> None:
    total = NUM_PROMPTS * NUM_BLOCKS
    with node.daemon() as daemon, PatternEngine(node.socket) as engine:
        store_all(node, engine)
        inside = engine.payloads(NUM_PROMPTS // 2, NUM_BLOCKS)[-1]
        harm(place_of(node, inside)[0])
        num_loaded = num_from_ssd(node, engine)
        print(f"{num_loaded} of {total} blocks came, while the daemon runs")
        assert 0.6 * total < num_loaded < total
        all_again(node, engine)
        assert daemon.stop() == 0
    harm(place_of(node, inside)[0])
    with node.daemon(), PatternEngine(node.socket) as engine:
        num_loaded = num_from_ssd(node, engine)
        print(f"{num_loaded} of {total} blocks came, after a restart")
        assert 0.5 * total < num_loaded < total
        all_again(node, engine)


def test_a_crash_after_acknowledged_stores_loses_none(node: RunningNode) -> None:
    with node.daemon() as daemon, PatternEngine(node.socket) as engine:
        store_all(node, engine)
        daemon.kill()
    with node.daemon(), PatternEngine(node.socket) as engine:
        assert num_from_ssd(node, engine) == NUM_PROMPTS * NUM_BLOCKS


def test_usage_is_right_before_the_first_write_and_a_lower_cap_holds_at_once(
    node: RunningNode,
) -> None:
    with node.daemon() as daemon, PatternEngine(node.socket) as engine:
        store_all(node, engine)
        before = node.stat()["tiers"]["ssd"]
        daemon.kill()
    with node.daemon() as daemon:
        after = node.stat()["tiers"]["ssd"]
        assert after["blocks"] == before["blocks"] == NUM_PROMPTS * NUM_BLOCKS
        assert after["used_bytes"] == sum(path.stat().st_size for path in segments(node)) > 0
        daemon.kill()
    cap_bytes = 4 * MIB
    with node.daemon(ssd__capacity="4MiB"):
        assert allocated_bytes(ssd_of(node)) <= cap_bytes
        status = node.stat()["tiers"]["ssd"]
        assert 0 < status["used_bytes"] <= cap_bytes
        assert 0 < status["blocks"] < NUM_PROMPTS * NUM_BLOCKS


def test_a_small_cap_is_never_exceeded_at_any_moment(node: RunningNode) -> None:
    cap_bytes = 8 * MIB
    peak_bytes, num_looks = 0, 0
    is_over = threading.Event()

    def watch() -> None:
        nonlocal peak_bytes, num_looks
        while not is_over.wait(0.001):
            peak_bytes = max(peak_bytes, allocated_bytes(ssd_of(node)))
            num_looks += 1

    tight = {"ssd__capacity": "8MiB", "cpu__capacity": "2MiB", "cpu__slab": "256KiB"}
    with node.daemon(**tight), Traffic(node, seed=300, num_prompts=200) as traffic:
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            wanted = 3 * cap_bytes
            await_true(
                lambda: node.stat()["transfers"]["cpu_to_ssd"]["bytes"] > wanted,
                "three times the cap is written",
                60,
            )
            traffic.await_loaded("ssd")
        finally:
            is_over.set()
            watcher.join()
    print(f"peak {peak_bytes} of {cap_bytes} bytes in {num_looks} looks")
    assert num_looks > 100
    assert cap_bytes // 2 < peak_bytes <= cap_bytes


def test_the_directory_is_deleted_under_load(node: RunningNode) -> None:
    with node.daemon(cpu__capacity="2MiB", cpu__slab="256KiB") as daemon:
        with Traffic(node, seed=400) as traffic:
            traffic.await_loaded("ssd")
            away = ssd_of(node).with_name("gone")
            ssd_of(node).rename(away)
            for path in away.iterdir():
                path.unlink()
            away.rmdir()
            traffic.await_loaded("cpu")

            def is_made_again() -> bool:
                """The daemon makes it, or says that it cannot do without and the operator does."""
                if node.stat()["tiers"]["ssd"]["state"] != "up" and not ssd_of(node).exists():
                    ssd_of(node).mkdir(mode=0o700, exist_ok=True)
                return bool(segments(node))

            await_true(is_made_again, "blocks are written to a new directory", 30)
            node.await_state("ssd", "up", timeout_s=BACK_S)
            node.await_moved("cpu_to_ssd", BACK_S)
            traffic.await_loaded("ssd", BACK_S)
        status = node.await_idle(20)
        assert status["pins"] == 0
        assert "Traceback" not in daemon.log
        assert daemon.stop() == 0


def test_two_daemons_on_one_directory(node: RunningNode) -> None:
    with node.daemon() as daemon, PatternEngine(node.socket) as engine:
        assert engine.store(1, 4) == 4
        other = {"daemon__socket": str(node.directory / "b.sock"), "http__listen": ""}
        with node.start("serve", **other) as second:
            assert second.wait() == 2
            line = second.log.splitlines()[-1]
        assert str(daemon.pid) in line, "it says who has it"
        assert "ssd.directory" in line
        node.await_idle()
        node.drop("cpu")
        assert engine.load(1, 4) == (["ssd"] * 4, "complete"), "the first one is unharmed"


def test_a_file_of_a_newer_format_is_no_hit_and_no_obstacle(node: RunningNode) -> None:
    with node.daemon() as daemon, PatternEngine(node.socket) as engine:
        store_all(node, engine)
        assert daemon.stop() == 0
    with segments(node)[0].open("r+b") as file:
        file.seek(8)  # after the magic
        file.write(b"\x63\x00")
    with node.daemon(), PatternEngine(node.socket) as engine:
        num_loaded = num_from_ssd(node, engine)
        print(f"{num_loaded} blocks are left")
        assert 0.6 * NUM_PROMPTS * NUM_BLOCKS < num_loaded < NUM_PROMPTS * NUM_BLOCKS
        detail = node.stat()["tiers"]["ssd"]["detail"]
        assert detail["files_dropped_at_start"] + detail["files_unreadable_at_start"] == 1
        all_again(node, engine)


def test_files_are_the_owners_alone(node: RunningNode) -> None:
    before = os.umask(0)
    try:
        with node.daemon(), PatternEngine(node.socket) as engine:
            store_all(node, engine)
            assert stat.S_IMODE(ssd_of(node).stat().st_mode) == 0o700
            modes = {
                path.name: stat.S_IMODE(path.stat().st_mode) for path in ssd_of(node).iterdir()
            }
            assert set(modes.values()) == {0o600}, modes
    finally:
        os.umask(before)


@pytest.fixture
def server() -> Iterator[tuple[RedisServer, Child]]:
    with work_directory() as directory:
        redis_server = RedisServer(directory)
        with redis_server.start() as child:
            yield redis_server, child


@pytest.fixture
def shared(server: tuple[RedisServer, Child]) -> Iterator[RunningNode]:
    settings = {
        "remote.url": server[0].url,
        "remote.min_tokens": 0,
        "ssd.enabled": "false",
        "cpu.capacity": "2MiB",
        "cpu.slab": "256KiB",
    }
    with work_directory() as directory:
        yield RunningNode(directory, settings)


def readiness(node: RunningNode) -> str:
    return fetch(f"http://127.0.0.1:{node.http_port}/readyz").decode()


def back_in_use(node: RunningNode, traffic: Traffic) -> None:
    start_s = time.monotonic()
    node.await_state("remote", "up", timeout_s=BACK_S)
    node.await_moved("cpu_to_remote", BACK_S)
    traffic.await_loaded("remote", BACK_S)
    print(f"in use again after {time.monotonic() - start_s:.2f} s")


@pytest.mark.redis
def test_a_frozen_server_hangs_nobody_and_is_used_again(
    shared: RunningNode, server: tuple[RedisServer, Child]
) -> None:
    with shared.daemon() as daemon:
        with Traffic(shared, seed=500) as traffic:
            traffic.await_loaded("remote")
            with server[1].stopped():
                reason = shared.await_state("remote", "out")
                print(f"the status says: {reason}")
                assert reason
                await_true(lambda: '"out"' in readiness(shared), "the probe says it, and is ready")
                traffic.await_loaded("cpu")
            back_in_use(shared, traffic)
        assert shared.await_idle()["pins"] == 0
        assert "Traceback" not in daemon.log
        assert daemon.stop() == 0


@pytest.mark.redis
def test_a_server_that_is_killed_and_comes_back_empty(
    shared: RunningNode, server: tuple[RedisServer, Child]
) -> None:
    with shared.daemon() as daemon:
        with Traffic(shared, seed=600) as traffic:
            traffic.await_loaded("remote")
            server[1].kill()
            assert shared.await_state("remote", "out")
            traffic.await_loaded("cpu")
            with server[0].start(), server[0].client() as client:
                client.flushall()
                back_in_use(shared, traffic)
                assert client.dbsize() > 0
        assert shared.await_idle()["pins"] == 0
        assert "Traceback" not in daemon.log
        assert daemon.stop() == 0


@pytest.mark.redis
def test_a_daemon_starts_while_its_server_is_frozen(
    shared: RunningNode, server: tuple[RedisServer, Child]
) -> None:
    with server[1].stopped():
        start_s = time.monotonic()
        with shared.daemon() as daemon, PatternEngine(shared.socket) as engine:
            print(f"ready after {time.monotonic() - start_s:.2f} s")
            assert engine.store(1, 4) == 4
            assert engine.load(1, 4) == (["cpu"] * 4, "complete")
            assert daemon.stop() == 0


def test_the_pattern_is_what_the_tests_think() -> None:
    engine = PatternEngine(Path("none"))
    payloads = engine.payloads(1, 3)
    assert len(set(payloads)) == 3
    assert {len(payload) for payload in payloads} == {BLOCK_BYTES}
    assert engine.payloads(2, 3) != payloads
