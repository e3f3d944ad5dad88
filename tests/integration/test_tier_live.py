"""Tiers are drained, detached and attached while engines use them, through the command alone."""

import contextlib
import errno
import io
import json
import os
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from kvtier.cli.main import main
from kvtier.testing.child import Child, await_true, work_directory
from kvtier.testing.running_node import RunningNode, fetch
from kvtier.tiers.ssd.directory import DirectoryLock
from kvtier.v1 import engine_pb2
from kvtier.v1 import operator_pb2 as pb
from tests.integration.pattern import PatternEngine, in_threads
from tests.integration.redis_child import RedisServer
from tests.integration.traffic import Traffic
from tests.shim.storage import Call, StorageShim, block, fail

pytestmark = pytest.mark.slow

FULL = 8
SMALL = {"cpu.capacity": "2MiB", "cpu.slab": "256KiB", "ssd.capacity": "16MiB"}


class Node(RunningNode):
    """A node and its operator; its disk may be slow, but for those whose disk hangs."""

    def __init__(self, directory: Path, *more: Any) -> None:
        super().__init__(directory, *(more or ({"ssd.deadline": "10s"},)))

    def tier(self, *words: str) -> tuple[int, str]:
        """Run ``kvtier tier``, here, since it takes longer to start; returns code and words."""
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = main(["tier", *words, "--connect", str(self.socket)])
        return code, said.getvalue()

    def change(self, verb: pb.TierVerb.ValueType, replies: list[pb.ChangeTierReply]) -> None:
        """Ask for a change of the SSD tier, as one operator of several."""
        request = pb.ChangeTierRequest(tier=engine_pb2.TIER_SSD, verb=verb, wait_ms=30_000)
        with self._stub() as stub:
            replies.append(stub.ChangeTier(request, timeout=40))

    def done(self, *words: str) -> str:
        code, said = self.tier(*words)
        assert code == 0, said
        return said

    def refused(self, *words: str) -> str:
        code, said = self.tier(*words)
        assert code == 2, said
        print(said)
        return said

    def state(self, tier: str) -> tuple[str, str]:
        document = self.stat()["tiers"][tier]
        return document["state"], document["reason"]

    def await_gauge(self, tier: str, state: str) -> None:
        def look() -> bool:
            return self.metric("kvtier_tier_state", tier=tier, state=state) == 1

        await_true(look, f"the gauge says that {tier} is {state}")

    def open_files(self, child: Child, directory: Path) -> list[str]:
        """The files below a directory that a process has open, which keep it from an unmount."""
        found = []
        for each in Path(f"/proc/{child.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(each))
        return [name for name in found if name.startswith(f"{directory}/")]


@pytest.fixture
def node() -> Iterator[Node]:
    with work_directory() as directory:
        yield Node(directory)


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with work_directory() as directory:
        yield RedisServer(directory)


@pytest.fixture
def disk() -> Iterator[tuple[Node, StorageShim]]:
    """A node whose SSD fails on demand."""
    with (
        work_directory() as directory,
        work_directory() as scratch,
        StorageShim(directory / "ssd", scratch) as shim,
    ):
        yield Node(directory, {"ssd.deadline": "1s"}, shim.environment), shim


@contextlib.contextmanager
def bothered(node: Node) -> Iterator[None]:
    """Have the SSD tier checked, measured and emptied of a tenant meanwhile, again and again."""
    over, faults = threading.Event(), list[BaseException]()

    def bother() -> None:
        ssd = [engine_pb2.TIER_SSD]
        drop = pb.DropRequest(tiers=ssd, deadline_ms=500, tenant=bytes(15) + b"x")
        try:
            while not over.is_set():
                with node._stub() as stub:
                    stub.Drop(drop, timeout=30)
                    stub.Probe(pb.ProbeRequest(tiers=ssd), timeout=60)
                    for _ in stub.Fsck(pb.FsckRequest(), timeout=60):
                        pass
        except grpc.RpcError as refusal:
            if not over.is_set() and "detached" not in str(refusal):
                faults.append(refusal)
        except BaseException as fault:
            faults.append(fault)

    thread = threading.Thread(target=bother, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(90)
    assert not thread.is_alive()
    assert not faults, faults


def fill(node: Node, engine: PatternEngine, num_prompts: int = 4) -> None:
    """Store prompts, and leave them in the SSD tier alone."""
    for prompt in range(num_prompts):
        assert engine.store(prompt, FULL) == FULL
    node.await_blocks("ssd", num_prompts * FULL)
    node.drop("cpu")


def test_a_disk_is_taken_away_and_brought_back(node: Node) -> None:
    directory = node.directory / "ssd"
    with node.daemon() as daemon, PatternEngine(node.socket) as engine:
        fill(node, engine)
        assert node.done("detach", "ssd") == "ssd is detached\n"
        assert node.state("ssd") == ("detached", "by an operator")
        assert not node.open_files(daemon, directory)
        DirectoryLock(directory).release()  # anybody may have it
        code, report = node.fsck()
        assert (code, report["records"]) == (0, 4 * FULL)
        documents = [directory / name for name in ("learned.json", "key_spaces.json")]
        for path in documents:
            path.unlink()
        assert engine.lookup(0, FULL) == ([], "absent")
        (kept,) = node.drop_now("ssd")
        assert kept.error == "detached; it keeps its blocks"
        assert engine.store(9, FULL) == FULL, "the rest goes on"
        assert engine.load(9, FULL) == (["cpu"] * FULL, "complete")
        node.await_gauge("ssd", "detached")  # which is set together with what follows
        ready = json.loads(fetch(f"http://127.0.0.1:{node.http_port}/readyz"))
        assert ready["ready"]
        assert ready["tiers"]["ssd"] == {"state": "detached", "reason": "by an operator"}
        assert node.done("attach", "ssd") == "ssd is up\n"
        assert engine.load(0, FULL) == (["ssd"] * FULL, "complete")
        assert engine.store(10, FULL) == FULL
        node.await_blocks("ssd", 5 * FULL)
        missed = node.stat()["worth"]["missed_blocks"]
        assert missed["detached"] == FULL, "and it says why the lookup found nothing"
        assert daemon.stop() == 0
        assert all(path.exists() for path in documents), "they are kept there again"
        assert "Traceback" not in daemon.log
    with node.daemon(), PatternEngine(node.socket) as engine:
        assert engine.lookup(10, FULL) == (["ssd"] * FULL, "complete")


def test_what_others_did_to_a_store_meanwhile_is_read_anew(node: Node) -> None:
    away = node.directory / "away"
    with node.daemon(), PatternEngine(node.socket) as engine:
        fill(node, engine)
        node.done("detach", "ssd")
        (node.directory / "ssd").rename(away)
        (node.directory / "other").mkdir()
        other = Node(node.directory / "other")
        with other.daemon(ssd__directory=str(away)), PatternEngine(other.socket) as elsewhere:
            other.drop("ssd")
            assert elsewhere.store(7, FULL) == FULL
            other.await_blocks("ssd", FULL)
        away.rename(node.directory / "ssd")
        node.done("attach", "ssd")
        assert engine.lookup(0, FULL) == ([], "absent")
        assert engine.load(7, FULL) == (["ssd"] * FULL, "complete")


def test_a_drained_tier_is_read_and_not_written(node: Node) -> None:
    with node.daemon(), PatternEngine(node.socket) as engine:
        fill(node, engine)
        assert node.tier("drain", "ssd", "--wait", "0")[0] in {0, 1}
        assert "drained" in node.done("drain", "ssd", "--wait", "10")
        assert node.state("ssd") == ("drained", "by an operator")
        node.await_gauge("ssd", "drained")
        written = node.metric("kvtier_ssd_written_bytes_total", kind="blocks")
        assert engine.store(9, FULL) == FULL
        assert engine.load(0, FULL) == (["ssd"] * FULL, "complete")
        node.await_idle()
        assert node.stat()["tiers"]["ssd"]["blocks"] == 4 * FULL
        assert "is not detached" in node.refused("attach", "ssd")
        node.done("resume", "ssd")
        assert node.state("ssd") == ("up", "")
        assert engine.store(10, FULL) == FULL
        node.await_blocks("ssd", 5 * FULL)
        assert node.metric("kvtier_ssd_written_bytes_total", kind="blocks") >= written


def test_requests_go_on_while_a_tier_comes_and_goes(node: Node) -> None:
    """With scrubs, checks, measurements and drops beside it; every byte is compared."""
    node.settings |= SMALL | {"ssd.scrub_rate": "16MiB"}
    with node.daemon() as daemon:
        with Traffic(node, seed=60, num_engines=2) as traffic:
            for now in ((), ("--now",), ()):
                traffic.await_loaded("ssd", 60)
                with bothered(node):
                    node.done("detach", "ssd", *now)
                traffic.await_loaded("cpu", 60)
                assert node.state("ssd")[0] == "detached"
                node.done("attach", "ssd")
            traffic.await_loaded("ssd", 60)
            node.done("drain", "ssd", "--wait", "30")
            traffic.await_loaded("ssd", 60)
            node.done("resume", "ssd")
        node.await_idle()
        document = node.stat()
        assert document["pins"] == document["leases"] == 0
        assert not document["background_faults"]
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log
    assert node.fsck()[0] == 0


def test_several_operators_want_the_same_at_once(node: Node) -> None:
    with node.daemon(), PatternEngine(node.socket) as engine:
        fill(node, engine)
        for verb, state in (
            (pb.TIER_VERB_DETACH, "detached"),
            (pb.TIER_VERB_ATTACH, "up"),
            (pb.TIER_VERB_DRAIN, "drained"),
        ):
            replies = list[pb.ChangeTierReply]()
            ask = partial(node.change, verb, replies)
            in_threads([ask] * 3)
            assert [(each.done, each.state) for each in replies] == [(True, state)] * 3
        assert engine.load(0, FULL) == (["ssd"] * FULL, "complete")


# What hangs


def test_a_disk_that_hangs_holds_up_nobody(
    disk: tuple[Node, StorageShim],
) -> None:
    node, shim = disk
    with node.daemon() as daemon, PatternEngine(node.socket) as engine:
        fill(node, engine)
        with shim.suffering({Call.WRITE: block(), Call.OPEN_WRITE: block()}):
            assert engine.store(50, FULL) == FULL
            await_true(lambda: node.state("ssd")[0] == "out", "it hangs")
            assert "stays drained" in node.refused("detach", "ssd", "--wait", "0.5")
            state, reason = node.state("ssd")
            assert (state, reason.endswith("; drained by an operator")) == ("out", True)
            code, told = node.tier("detach", "ssd", "--now", "--wait", "0.5")
            assert code == 1
            assert "not closed yet: no answer to a" in told, told
            held = node.refused("attach", "ssd")
            assert "ssd.directory: is still in use by the detached tier" in held
            assert engine.load(50, FULL) == (["cpu"] * FULL, "complete")
            assert engine.lookup(0, FULL) == ([], "absent")
        await_true(lambda: node.state("ssd")[1] == "by an operator", "it closes", 20)
        assert not node.open_files(daemon, node.directory / "ssd")
        node.done("attach", "ssd")
        assert engine.load(0, FULL) == (["ssd"] * FULL, "complete")
        node.await_idle()
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log


def test_an_attachment_that_hangs_can_be_called_off(
    disk: tuple[Node, StorageShim],
) -> None:
    node, shim = disk
    with node.daemon(), PatternEngine(node.socket) as engine:
        fill(node, engine)
        node.done("detach", "ssd")
        with shim.suffering({Call.OPEN_READ: block()}):
            code, told = node.tier("attach", "ssd", "--wait", "0.5")
            assert (code, told) == (
                1,
                "ssd is detached: being attached, 0 blocks so far\n",
            )
            assert node.done("detach", "ssd") == "ssd is detached\n"
        await_true(lambda: node.tier("attach", "ssd")[0] == 0, "it lets go", 20)
        assert engine.load(0, FULL) == (["ssd"] * FULL, "complete")


# What is refused, and leaves nothing behind


def test_an_attachment_that_cannot_be_says_why(node: Node) -> None:
    directory, aside = node.directory / "ssd", node.directory / "aside"
    with node.daemon() as daemon, PatternEngine(node.socket) as engine:
        fill(node, engine)
        node.done("detach", "ssd")
        lock = DirectoryLock(directory)
        assert f"{directory} is held by pid {os.getpid()}" in node.refused("attach", "ssd")
        lock.release()
        directory.rename(aside)
        directory.write_text("a file")
        assert "ssd.directory:" in node.refused("attach", "ssd")
        directory.unlink()
        aside.rename(directory)
        for tier in ("cpu", "gpu"):
            assert f"kvtier: {tier}: " in node.refused("detach", tier)
        assert "remote.url: disables the tier" in node.refused("attach", "remote")
        assert "is off" in node.refused("detach", "remote")
        assert node.state("ssd") == ("detached", "by an operator")
        node.done("attach", "ssd")
        assert engine.load(0, FULL) == (["ssd"] * FULL, "complete")
        assert "Traceback" not in daemon.log


def test_a_full_disk_is_not_attached(
    disk: tuple[Node, StorageShim],
) -> None:
    node, shim = disk
    with node.daemon():
        node.done("detach", "ssd")
        with shim.suffering({Call.OPEN_WRITE: fail(errno.ENOSPC)}):
            assert "ssd.directory" in node.refused("attach", "ssd")
        node.done("attach", "ssd")


def test_the_end_of_the_daemon_ends_an_attachment_and_a_crash_forgets_it_all(
    disk: tuple[Node, StorageShim],
) -> None:
    node, shim = disk
    with node.daemon() as daemon, PatternEngine(node.socket) as engine:
        fill(node, engine)
        node.done("detach", "ssd")
        with shim.suffering({Call.OPEN_READ: block()}):
            assert node.tier("attach", "ssd", "--wait", "0.2")[0] == 1
            assert daemon.stop() == 0
    with node.daemon() as daemon:
        assert node.state("ssd")[0] == "up"
        node.done("detach", "ssd")
        daemon.kill()
    with node.daemon(), PatternEngine(node.socket) as engine:
        assert engine.load(0, FULL) == (["ssd"] * FULL, "complete")


# The remote tier


def num_keys(redis: RedisServer) -> int:
    with redis.client() as client:
        return client.dbsize()


def test_a_redis_server_is_moved(node: Node, redis: RedisServer) -> None:
    node.settings |= {"remote.url": redis.url, "remote.min_tokens": 0, "ssd.enabled": "false"}
    with node.daemon() as daemon, PatternEngine(node.socket) as engine:
        with redis.start():
            assert engine.store(0, FULL) == FULL
            await_true(lambda: num_keys(redis) == FULL, "it is written")
            node.drop("cpu")
            assert node.done("detach", "remote") == "remote is detached\n"
            links = [each.raddr for each in psutil.Process(daemon.pid).net_connections("tcp4")]
            assert redis.port not in [each.port for each in links if each], "it is let go of"
            asked = node.stat()["probed_lookups"]
            assert engine.lookup(0, FULL) == ([], "absent")
            assert node.stat()["probed_lookups"] == asked, "nobody is asked"
        assert "remote.url: " in node.refused("attach", "remote")
        assert node.state("remote") == ("detached", "by an operator")
        with redis.start():
            node.done("attach", "remote")
            assert engine.store(3, FULL) == FULL
            await_true(lambda: num_keys(redis) == FULL, "it is written")
            node.await_gauge("remote", "up")
            node.done("drain", "remote", "--wait", "10")
        reason = node.await_state("remote", "out", timeout_s=30)
        assert reason.endswith("; drained by an operator"), "what is read from is missed"
        assert "Traceback" not in daemon.log


# Configured anew


def test_a_tier_that_is_off_is_configured_and_attached(node: Node) -> None:
    for key in [key for key in node.settings if key.startswith("ssd.")]:
        node.settings.pop(key)
    path = node.directory / "kvtier.toml"

    def configure(**values: Any) -> None:
        lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items())
        path.with_suffix(".new").write_text(f"[ssd]\n{lines}\n")
        path.with_suffix(".new").replace(path)

    def store(name: str) -> dict[str, Any]:
        place = str(node.directory / name)
        return {"directory": place, "capacity": "16MiB", "segment": "4MiB", "write": "store"}

    configure(enabled=False)
    with node.start("serve", "--config", str(path)) as daemon:
        daemon.await_log("event=ready")
        with PatternEngine(node.socket) as engine:
            assert node.state("ssd") == ("off", "")
            assert "ssd.enabled" in node.refused("attach", "ssd")
            for name in ("one", "two"):
                configure(**store(name), free_space_floor="0B")
                assert main(["config", "reload", "--connect", str(node.socket)]) == 0
                node.done("attach", "ssd")
                assert engine.store(len(name) + ord(name[0]), FULL) == FULL
                node.await_blocks("ssd", FULL)
                assert list((node.directory / name).glob("*.segment"))
                node.done("detach", "ssd")
            configure(enabled=False)
            shutil.rmtree(node.directory / "one")
            assert daemon.stop() == 0
            assert "Traceback" not in daemon.log
