"""KV events: a router that listens to a real vLLM knows what the daemon's tiers have for it."""

import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.child import Child, await_true, work_directory
from kvtier.testing.running_node import RunningNode
from kvtier.testing.vllm_server import VllmServer
from tests.vllm.servers import RELEASES, STARTED, prompt, running

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def python_of(release: str) -> str:
    return str(ROOT / ".vllm" / release / "bin" / "python")


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.skipif(not RELEASES, reason="make test-vllm runs it")
@pytest.mark.parametrize("release", RELEASES)
def test_we_speak_of_blocks_as_a_release_does(release: str) -> None:
    words = [python_of(release), str(HERE / "in_vllm_events.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"^{re.escape(release)}\.\d+: ok$", done.stdout, re.MULTILINE), done.stdout


@dataclass
class Router:
    """What a router knows by all that it has heard: ``AllBlocksCleared`` voids every medium."""

    log: Child

    def events(self) -> list[dict[str, Any]]:
        lines = self.log.log.rpartition("\n")[0].splitlines()  # the last one may be half there
        events: list[dict[str, Any]] = [json.loads(line) for line in lines if line[:1] == "{"]
        numbers = [event["batch"] for event in events]
        assert numbers == sorted(numbers)
        return events

    def names(self, medium: str) -> set[int]:
        """Return vLLM's hashes of the blocks that a medium has."""
        has: Counter[int] = Counter()
        for event in self.events():
            if event["type"] == "AllBlocksCleared":
                has.clear()
            elif event["medium"] == medium:
                stored = event["type"] == "BlockStored"
                for name in event["block_hashes"]:
                    has[name] = has[name] + 1 if stored else max(0, has[name] - 1)
        return {name for name, count in has.items() if count}

    def names_of(self, tokens: Sequence[int]) -> set[int]:
        """Return the hashes of a prompt's full blocks, as vLLM told of its own computing."""
        names: dict[tuple[int | None, tuple[int, ...]], int] = {}
        for event in self.events():
            if event["type"] == "BlockStored":
                size, parent = event["block_size"], event["parent_block_hash"]
                for place, name in enumerate(event["block_hashes"]):
                    said = tuple(event["token_ids"][place * size : (place + 1) * size])
                    assert names.setdefault((parent, said), name) == name, "one name for a block"
                    parent = name
        found: set[int] = set()
        last: int | None = None
        for start in range(0, len(tokens) // 128 * 128, 128):
            last = names.get((last, tuple(tokens[start : start + 128])))
            if last is None:
                break
            found.add(last)
        return found

    def await_media(self, tokens: Sequence[int], *media: str) -> None:
        """Wait until exactly these media have all of a prompt's full blocks."""

        def look() -> bool:
            wanted = self.names_of(tokens)
            is_known = len(wanted) == len(tokens) // 128
            return is_known and all(
                self.names(medium) & wanted == (wanted if medium in media else set())
                for medium in ("CPU", "STORAGE")
            )

        await_true(look, f"the prompt is told to be in {media}", timeout_s=20)


@pytest.fixture(scope="module")
def publishing(start: Callable[..., VllmServer]) -> Iterator[tuple[VllmServer, Router]]:
    """A server that publishes its events, and one who listens from the first on."""
    with work_directory() as directory:
        endpoint = f"ipc://{directory}/events"
        wanted = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
        words = [python_of(RELEASES[0]), str(HERE / "in_vllm_listener.py"), endpoint]
        with (
            Child(words, directory / "listener.log") as listener,
            start(RELEASES[0], "tiny", directory, kv_events_config=json.dumps(wanted)) as server,
        ):
            listener.await_log("listening")
            server.await_ready()

            def has_begun() -> bool:
                server.ask(prompt(0), 1)
                return "vLLM's blocks are offered" in server.child.log

            await_true(has_begun, "the scheduler half has begun", timeout_s=60)
            server.ask(prompt(0), 1)  # with which the worker half begins
            yield server, Router(listener)
            assert "Traceback" not in server.child.log
            listener.kill()


@pytest.fixture
def served(publishing: tuple[VllmServer, Router], tmp_path: Path) -> RunningNode:
    """A node where the server looks for it."""
    socket = publishing[0].child.log_path.parent / "k.sock"
    settings = {
        "daemon.socket": str(socket),
        "cpu.capacity": "96MiB",
        "cpu.slab": "8MiB",
        "ssd.capacity": "256MiB",
        "ssd.segment": "32MiB",
    }
    return RunningNode(tmp_path, settings)


ON_ONE = pytest.mark.xdist_group("publishing")
NEEDS_ONE = pytest.mark.skipif(not RELEASES, reason="make test-vllm runs it")


def started(test: Any) -> Any:
    for mark in (*STARTED, ON_ONE, NEEDS_ONE):
        test = mark(test)
    return test


@started
def test_a_block_is_told_from_its_store_to_its_end(
    publishing: tuple[VllmServer, Router], served: RunningNode
) -> None:
    vllm, router = publishing
    first, second, third = prompt(1), prompt(2), prompt(3)
    with running(served):
        vllm.ask(first)
        served.await_blocks("ssd", 4)
        vllm.ask(second)  # a step after which all of the first one is told
        router.await_media(first, "CPU", "STORAGE")
        served.await_blocks("ssd", 8)
        served.drop("cpu")
        vllm.ask(third)
        router.await_media(first, "STORAGE")
        router.await_media(second, "STORAGE")
        vllm.forget()  # says that all blocks are gone, its own
        served.await_idle()
        assert vllm.ask(first)
        router.await_media(first, "CPU", "STORAGE")
        router.await_media(second, "STORAGE")


@started
def test_a_reset_is_told_at_once(
    publishing: tuple[VllmServer, Router], served: RunningNode
) -> None:
    vllm, router = publishing
    asked, other = prompt(11), prompt(12)
    with running(served):
        vllm.ask(asked)
        served.await_blocks("ssd", 4)
        vllm.ask(other)
        router.await_media(asked, "CPU", "STORAGE")
        vllm.forget()  # until no store holds a block of its own
        served.await_idle()
        assert vllm.reset("?reset_external=true")
        router.await_media(asked)
        tiers = served.stat()["tiers"]
        assert (tiers["cpu"]["blocks"], tiers["ssd"]["blocks"]) == (0, 0)
        hits = vllm.hit_tokens()
        vllm.ask(asked)
        assert vllm.hit_tokens() == hits


@started
def test_a_daemon_that_ends_has_nothing_until_it_is_back(
    publishing: tuple[VllmServer, Router], served: RunningNode
) -> None:
    vllm, router = publishing
    asked = prompt(21)
    with running(served):
        vllm.ask(asked)
        served.await_blocks("ssd", 4)
        vllm.ask(prompt(22))
        router.await_media(asked, "CPU", "STORAGE")
    vllm.ask(prompt(23))
    router.await_media(asked)
    with running(served):
        vllm.ask(prompt(24))
        router.await_media(asked, "STORAGE")
