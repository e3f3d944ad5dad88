"""A reload applies all or nothing, one at a time, and whatever becomes of the file."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import Config, load_config, read_config
from kvtier.core.residency import TierName
from kvtier.daemon import reload as reloads
from kvtier.daemon.reload import Reload
from kvtier.testing.child import await_true

OLD = load_config(None, {"cost.restore": "always"}, {})
NEW = load_config(None, {"cost.restore": "never", "ssd.gate": "0.5"}, {})
RESTART = load_config(None, {"cost.restore": "never", "ssd.io_threads": "9"}, {})


def run(step: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test on a loop, with a deadline."""
    await_true(lambda: not _threads(), "those of earlier tests have ended")
    asyncio.run(asyncio.wait_for(step(), 30))


def test_all_of_it_is_applied_or_nothing() -> None:
    async def step() -> None:
        wanted, held = [NEW], list[Config]()
        reload = Reload(OLD, lambda: wanted[0])
        reload.begin(held.append)
        assert (await reload.ask())["outcome"] == "applied"
        assert held == [NEW]
        assert (await reload.ask())["outcome"] == "unchanged"
        wanted[0] = RESTART
        told = await reload.ask()
        assert told["outcome"] == "refused"
        way = "needs a restart, or `kvtier tier detach ssd` first"
        assert told["reasons"] == [f"ssd.io_threads: 4 to 9 (command line): {way}"]
        assert reload.config is NEW
        assert held[-1] is NEW
        assert reload.document()["reloads"] == 3

    run(step)


def test_another_login_is_taken_with_a_reload_or_by_itself() -> None:
    def by(login: str, place: str = "cache") -> Config:
        return load_config(None, {"remote.url": f"rediss://{login}@{place}"}, {})

    async def step() -> None:
        wanted, held, open_meanwhile = [by("kv:new")], list[Config](), list[bool]()

        def read() -> Config:
            open_meanwhile.append(reload.is_open)
            return wanted[0]

        reload = Reload(by("kv:old"), read)
        assert not reload.is_open
        reload.begin(held.append)
        assert reload.is_open
        told = await reload.ask()
        assert told["outcome"] == "applied"
        assert told["changed"] == ['remote.url: "rediss://***@cache", another login (command line)']
        assert not reload.take_secret(TierName.REMOTE, wanted[0].tiers["remote"].url, "f")
        assert len(held) == 1, "it holds already"
        assert reload.is_open
        assert open_meanwhile == [False], "what is being read may be the URL of before"
        assert not reload.take_secret(TierName.REMOTE, "rediss://kv:newer@cache", "f")
        assert held[-1].tiers["remote"].url == "rediss://kv:newer@cache"
        assert held[-1].source_of("remote.url") == "f"
        refused = reload.take_secret(TierName.REMOTE, "rediss://kv:newest@other", "f")
        assert "needs a restart, or `kvtier tier detach remote` first" in refused
        assert "newest" not in refused
        assert len(held) == 2
        reload.is_free = lambda key: key == "remote.url"
        assert not reload.take_secret(TierName.REMOTE, "rediss://kv:newest@other", "f")
        assert reload.config.tiers["remote"].url == "rediss://kv:newest@other"

    run(step)


def test_a_tier_that_is_off_may_change_but_not_what_is_learned_by() -> None:
    async def step() -> None:
        wanted = ["ssd.io_threads", "9"]
        given = {"cost.restore": "always"}
        reload = Reload(OLD, lambda: load_config(None, given | {wanted[0]: wanted[1]}, {}))
        reload.is_free = lambda key: key.startswith("ssd.")
        reload.begin(lambda _config: None)
        assert (await reload.ask())["outcome"] == "applied"
        wanted[:] = ["ssd.eviction", "rd"]
        told = await reload.ask()
        assert told["outcome"] == "refused"
        (reason,) = told["reasons"]
        assert reason.endswith("needs a restart"), "what was learned would not go by it"

    run(step)


def test_before_the_daemon_serves_nothing_is_applied() -> None:
    async def step() -> None:
        told = await Reload(OLD, lambda: NEW).ask()
        assert told["reasons"] == ["the daemon is starting or stopping"]

    run(step)


def test_a_file_that_hangs_has_one_thread_however_often_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reloads, "_READ_LIMIT_S", 0.05)
    answers = threading.Event()

    async def step() -> None:
        reload = Reload(OLD, lambda: OLD if answers.wait(30) else NEW)
        reload.begin(lambda _config: None)
        told = [(await reload.ask())["reasons"] for _ in range(3)]
        assert "could not be read" in told[0][0]
        assert all("is still reading" in reasons[0] for reasons in told[1:])
        assert len(_threads()) == 1
        answers.set()
        monkeypatch.setattr(reloads, "_READ_LIMIT_S", 10.0)
        while (await reload.ask())["outcome"] != "unchanged":
            await asyncio.sleep(0)

    run(step)


def test_a_part_that_breaks_gets_the_old_one_back() -> None:
    async def step() -> None:
        held = list[Config]()

        def adopt(config: Config) -> None:
            held.append(config)
            if config is NEW:
                raise RuntimeError("a bug")

        reload = Reload(OLD, lambda: NEW)
        reload.begin(adopt)
        told = await reload.ask()
        assert told["outcome"] == "refused"
        assert "a bug" in told["reasons"][0]
        assert held == [NEW, OLD]
        assert reload.config is OLD

    run(step)


def test_who_asks_meanwhile_gets_one_more_that_reads_later() -> None:
    async def step() -> None:
        gate, reads = threading.Event(), list[str]()
        wanted = [OLD]

        def read() -> Config:
            reads.append("begun")
            found = wanted[0]
            assert gate.wait(30)
            return found

        reload = Reload(OLD, read)
        reload.begin(lambda _config: None)
        first = asyncio.create_task(reload.ask())
        while not reads:
            await asyncio.sleep(0)
        wanted[0] = NEW
        others = [asyncio.create_task(reload.ask()) for _ in range(50)]
        for _ in range(50):
            reload.request()
        gate.set()
        assert (await first)["outcome"] == "unchanged"
        assert [each["outcome"] for each in await asyncio.gather(*others)] == ["applied"] * 50
        assert len(reads) <= 3, "fifty that ask and fifty signals make one, or two"

    run(step)


def test_told_before_it_begins_it_is_done_then() -> None:
    async def step() -> None:
        held = asyncio.Queue[Config]()
        reload = Reload(OLD, lambda: NEW)
        reload.request()
        reload.begin(held.put_nowait)
        assert await held.get() is NEW
        await reload.end()
        reload.request()
        await asyncio.sleep(0)
        assert reload.document()["reloads"] == 1

    run(step)


def test_one_under_way_at_the_end_applies_nothing() -> None:
    async def step() -> None:
        gate, held = threading.Event(), list[Config]()
        reload = Reload(OLD, lambda: NEW if gate.wait(30) else OLD)
        reload.begin(held.append)
        asked = asyncio.create_task(reload.ask())
        await asyncio.sleep(0)
        await reload.end()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert held == []

    run(step)


def test_a_signal_after_the_loop_harms_nobody() -> None:
    reload = Reload(OLD)

    async def step() -> None:
        reload.begin(lambda _config: None)

    run(step)
    reload.request()


@pytest.mark.slow
def test_a_file_that_is_being_written_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloads, "_SETTLED_S", 0.9)  # so long the writer may stand still here
    path = tmp_path / "kvtier.toml"
    path.write_text("[cost]\nrestore = 'always'\n")
    os.utime(path, (1, 1))
    config = load_config(path, {}, {})

    async def step() -> None:
        held = list[Config]()
        reload = Reload(config, lambda: read_config(path, {}, {}), path=path)
        reload.begin(held.append)
        with path.open("w") as file:  # as an editor does: emptied, then written
            file.flush()
            asked = asyncio.create_task(reload.ask())
            await asyncio.sleep(0)
            file.write("[cost]\nrestore = 'always'\nsplit = false\n")
        assert (await asked)["changed"] == [f"cost.split: true to false ({path}:3)"]
        assert [each.cost.restore for each in held] == ["always"]

    run(step)


@pytest.mark.slow
def test_a_file_that_is_written_for_ever_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloads, "_SETTLED_S", 1.1)  # so long the scribbler may stand still here
    path = tmp_path / "kvtier.toml"
    path.write_text("")
    is_over = threading.Event()

    def scribble() -> None:
        while not is_over.wait(0.01):
            os.utime(path, (time.time(), time.time()))

    async def step() -> None:
        reload = Reload(OLD, lambda: NEW, path=path)
        reload.begin(lambda _config: None)
        told = await reload.ask()
        assert told["outcome"] == "refused"
        assert "all the time" in told["reasons"][0]

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        run(step)
    finally:
        is_over.set()
        thread.join()


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)

    async def step() -> None:
        reload = Reload(OLD, lambda: read_config(path, {}, {}), path=path)
        reload.begin(lambda _config: None)
        assert "is not a regular file" in (await reload.ask())["reasons"][0]

    run(step)
    assert await_true(lambda: not _threads(), "no thread waits for it") is True


def _threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "kvtier-reload"]
