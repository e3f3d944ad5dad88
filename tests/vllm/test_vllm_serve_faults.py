"""What goes wrong beside a ``vllm serve``: every answer is the same, and nothing is left behind."""

import signal
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import pytest

from kvtier.testing.child import Child, await_true
from kvtier.testing.running_node import RunningNode
from kvtier.testing.vllm_server import VllmServer
from tests.shim.storage import Call, StorageShim, block
from tests.vllm.servers import (
    BLOCK_TOKENS,
    ON_FIRST,
    STARTED,
    ask,
    await_hit,
    await_stored,
    from_tier,
    prompt,
    running,
)

pytestmark = STARTED

PAGE = 4096
RECORD = b"KVTBLOCK"


@ON_FIRST
def test_many_at_once_in_a_pool_too_small_for_them(vllm: VllmServer, served: RunningNode) -> None:
    num_tokens = 6 * BLOCK_TOKENS - 10  # with their answers they need two blocks more, and all do
    begin = prompt(10, 2 * BLOCK_TOKENS)
    asked = [prompt(11 + number, num_tokens) for number in range(4)]
    asked += [begin + prompt(15 + number, num_tokens - len(begin)) for number in range(4)]
    wanted = [vllm.ask(each, 160) for each in asked]
    vllm.forget()
    with running(served):
        preempted = vllm.metric("vllm:num_preemptions_total")
        for round_number in range(3):
            loaded = vllm.hit_tokens()
            with ThreadPoolExecutor(len(asked)) as pool:
                answers = list(pool.map(lambda each: vllm.ask(each, 160), asked))
            for number, (answer, right) in enumerate(zip(answers, wanted, strict=True)):
                assert answer == right, f"prompt {number} in round {round_number}"
            vllm.forget()
            served.await_idle()
        assert vllm.metric("vllm:num_preemptions_total") > preempted
        assert vllm.hit_tokens() > loaded, "the last round had blocks from us"


@ON_FIRST
def test_clients_that_hang_up(vllm: VllmServer, served: RunningNode, disk: StorageShim) -> None:
    asked = prompt(20)
    with running(served):
        wanted = vllm.ask(asked, 8)
        await_stored(served, 4, "ssd")

        def hang_up(moment: Callable[[HTTPConnection], object]) -> None:
            vllm.forget()
            with vllm.asking(asked, 2000, stream=True) as connection:
                moment(connection)
            await_true(lambda: not num_requests(vllm), "vLLM has let go of it")

        for moment in (first_token, at_once, first_token):
            hang_up(moment)
        vllm.forget()
        served.drop("cpu")
        with disk.suffering({Call.READ: block()}):
            hang_up(lambda _: await_reading(served))
        assert ask(vllm, served, asked, num_tokens=8).tokens == wanted
        await_stored(served, 4, "cpu")
        await_hit(vllm, served, asked, from_tier(wanted, 512, "cpu"), num_tokens=8)


@ON_FIRST
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_daemon_lost_in_the_middle_of_a_load(
    vllm: VllmServer, served: RunningNode, disk: StorageShim, number: signal.Signals
) -> None:
    asked = [prompt(30 + each) for each in range(3)]
    with running(served) as daemon:
        wanted = [vllm.ask(each) for each in asked]
        await_stored(served, 12, "ssd")
        vllm.forget()
        served.drop("cpu")
        with disk.suffering({Call.READ: block()}):
            answers = ask_all(vllm, asked, lambda: lose(served, daemon, number))
        assert answers == wanted
        if number == signal.SIGSTOP:
            daemon.send(signal.SIGCONT)
        else:
            daemon.wait()
    with running(served):
        for each, right in zip(asked, wanted, strict=True):
            await_hit(vllm, served, each, from_tier(right, 512, "ssd"), "cpu")


@ON_FIRST
def test_a_daemon_killed_while_blocks_are_copied(vllm: VllmServer, served: RunningNode) -> None:
    asked = [prompt(40 + each, 1000) for each in range(4)]
    wanted = [vllm.ask(each) for each in asked]

    def are_stored() -> bool:
        """A daemon that was late is left alone for a second: then nothing is offered."""
        assert [vllm.ask(each) for each in asked] == wanted
        blocks: int = served.stat()["tiers"]["cpu"]["blocks"]
        return blocks == 28

    for _ in range(3):
        vllm.forget()
        with running(served) as daemon:
            await_true(are_stored, "all are in the CPU tier", 60)
            served.await_idle()
            vllm.forget()
            found = num_found(served)

            def kill(found: float = found, daemon: Child = daemon) -> None:
                await_true(lambda: num_found(served) > found, "the first one is found")
                daemon.kill()

            assert ask_all(vllm, asked, kill) == wanted


@ON_FIRST
def test_a_block_that_rots_on_the_disk(
    vllm: VllmServer, served: RunningNode, disk: StorageShim, tmp_path: Path
) -> None:
    asked = prompt(50)
    with running(served):
        wanted = vllm.ask(asked)
        await_stored(served, 4, "ssd")
        flip(tmp_path / "ssd", position=2)
        await_hit(vllm, served, asked, from_tier(wanted, 2 * BLOCK_TOKENS, "ssd"), "cpu")
        assert served.metric("kvtier_miss_blocks_total", tier="ssd", reason="checksum") == 1
        await_stored(served, 4, "ssd")
        await_hit(vllm, served, asked, from_tier(wanted, 4 * BLOCK_TOKENS, "ssd"), "cpu")
        assert served.metric("kvtier_miss_blocks_total") == 1


@ON_FIRST
def test_a_disk_that_never_answers(
    vllm: VllmServer, served: RunningNode, disk: StorageShim
) -> None:
    asked = prompt(60)
    with running(served, ssd__deadline="500ms"):
        wanted = vllm.ask(asked)
        await_stored(served, 4, "ssd")
        served.drop("cpu")
        with disk.suffering({Call.READ: block()}):
            assert ask(vllm, served, asked).tokens == wanted
        served.await_state("ssd", "up", timeout_s=20)
        assert ask(vllm, served, asked).tokens == wanted


def ask_all(
    vllm: VllmServer, asked: Sequence[list[int]], meanwhile: Callable[[], None]
) -> list[list[int]]:
    with ThreadPoolExecutor(len(asked)) as pool:
        answers: list[Future[list[int]]] = [pool.submit(vllm.ask, each) for each in asked]
        meanwhile()
        return [answer.result() for answer in answers]


def await_reading(served: RunningNode) -> None:
    def look() -> bool:
        reading: int = served.stat()["tiers"]["ssd"]["in_flight"]
        return reading > 0

    await_true(look, "the disk is being read")


def lose(served: RunningNode, daemon: Child, number: signal.Signals) -> None:
    await_reading(served)
    daemon.send(number)


def num_found(served: RunningNode) -> float:
    return served.metric("kvtier_lookup_blocks_total", outcome="hit")


def first_token(connection: HTTPConnection) -> None:
    assert connection.getresponse().readline().startswith(b"data: {")


def at_once(_connection: HTTPConnection) -> None:
    """vLLM may not even have begun."""


def num_requests(vllm: VllmServer) -> float:
    return vllm.metric("vllm:num_requests_running") + vllm.metric("vllm:num_requests_waiting")


def flip(directory: Path, position: int) -> None:
    """Change a byte of the payload of the one record that is at that place of its chain."""
    starts: list[tuple[Path, int]] = []
    for path in directory.glob("*.segment"):
        content = path.read_bytes()
        starts += [
            (path, start)
            for start in range(0, len(content), PAGE)
            if content.startswith(RECORD, start)
            and struct.unpack_from("<I", content, start + 12) == (position,)
        ]
    ((path, start),) = starts
    with path.open("r+b") as file:
        file.seek(start + PAGE + 5000)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x10]))
