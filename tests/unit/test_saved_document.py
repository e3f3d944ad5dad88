"""Documents beside the SSD's blocks: another version's is set aside, and ours follow their tier."""

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.core.residency import TierName
from kvtier.daemon.persistence.saved_document import (
    ASIDE,
    FILE_BYTES_MAX,
    SavedDocument,
    replace_saved,
)
from kvtier.runtime.driver import Driver
from kvtier.tiers.host import HostArena
from tests.unit.test_liveness import SLAB_BYTES, driver_of

NAME = "learned.json"


def content(version: int, of: str) -> bytes:
    return json.dumps({"version": version, "of": of}).encode()


@contextmanager
def opened() -> Iterator[Driver]:
    arena = HostArena(1, SLAB_BYTES)
    driver = driver_of(arena)
    yield driver
    driver.stop()
    arena.close()


def in_loop(scenario: Callable[[Driver], Any]) -> None:
    async def run() -> None:
        with opened() as driver:
            await scenario(driver)

    asyncio.run(run())


def kept(driver: Driver, directory: Path, version: int = 1) -> SavedDocument:
    return SavedDocument(driver, directory, name=NAME, version=version, what="learned state")


def found(driver: Driver, directory: Path, version: int) -> Any:
    return kept(driver, directory, version).read(lambda document: document["of"])


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_each_version_finds_its_own_again(tmp_path: Path) -> None:
    async def scenario(driver: Driver) -> None:
        await kept(driver, tmp_path, 1).save(content(1, "the old one's"))
        assert found(driver, tmp_path, 2) is None
        assert names(tmp_path) == {NAME}, "who only reads moves nothing"
        await kept(driver, tmp_path, 2).save(content(2, "the new one's"))
        assert found(driver, tmp_path, 1) == "the old one's", "the rollback"
        assert found(driver, tmp_path, 2) == "the new one's"
        await kept(driver, tmp_path, 1).save(content(1, "later"))
        assert found(driver, tmp_path, 1) == "later"
        assert found(driver, tmp_path, 2) == "the new one's", "and the next upgrade"
        await kept(driver, tmp_path, 3).save(content(3, "a third one's"))
        assert found(driver, tmp_path, 3) == "a third one's"
        assert found(driver, tmp_path, 1) == "later", "the last other version's is kept"
        assert found(driver, tmp_path, 2) is None
        assert names(tmp_path) == {NAME, NAME + ASIDE}, "and no more than that"

    in_loop(scenario)


def test_a_version_is_told_by_the_beginning_alone(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_bytes(b'{ "version": 7, in a form that is no JSON any more')
    replace_saved(path, 1, content(1, "ours"))
    assert (tmp_path / (NAME + ASIDE)).read_bytes().startswith(b'{ "version": 7')


@pytest.mark.parametrize(
    "worthless",
    [
        b"",
        b"{",
        b"[]",
        b'{"of": "nobody"}',
        b'{"version": "seven"}',
        b'{"version": 2, "long": "' + b"x" * FILE_BYTES_MAX + b'"}',
    ],
    ids=["empty", "cut", "no object", "no version", "no number", "too long"],
)
def test_what_is_nobodys_or_too_long_is_written_over(tmp_path: Path, worthless: bytes) -> None:
    path = tmp_path / NAME
    path.write_bytes(worthless)

    async def scenario(driver: Driver) -> None:
        assert found(driver, tmp_path, 1) is None
        await kept(driver, tmp_path).save(content(1, "ours"))
        assert found(driver, tmp_path, 1) == "ours"
        assert names(tmp_path) == {NAME}

    in_loop(scenario)


def test_where_there_is_nothing_to_say_only_our_own_goes(tmp_path: Path) -> None:
    async def scenario(driver: Driver) -> None:
        await kept(driver, tmp_path, 1).save(content(1, "ours"))
        await kept(driver, tmp_path, 2).save(content(2, "theirs"))
        await kept(driver, tmp_path, 1).save(b"")
        assert found(driver, tmp_path, 1) is None
        assert found(driver, tmp_path, 2) == "theirs"
        await kept(driver, tmp_path, 2).save(b"")
        assert names(tmp_path) == set()

    in_loop(scenario)


def test_without_a_tier_it_is_said_later(tmp_path: Path) -> None:
    async def scenario(driver: Driver) -> None:
        file = kept(driver, tmp_path)
        executor = driver.executors.pop(TierName.SSD)
        await file.save(content(1, "ours"))
        assert names(tmp_path) == set()
        driver.executors[TierName.SSD] = executor
        await file.save(content(1, "ours"))
        assert found(driver, tmp_path, 1) == "ours"

    in_loop(scenario)


def test_a_save_that_ends_after_a_move_says_nothing_of_the_new_place(tmp_path: Path) -> None:
    """The directory was replaced while the old one's disk was slow: the new one has nothing yet."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()

    class SlowExecutor:
        def __init__(self, file: SavedDocument) -> None:
            self._file = file

        async def run_in_background(
            self, _what: str, call: Callable[..., None], _limit_ns: int
        ) -> None:
            self._file.move_to(new)
            call(None, 0)

    async def scenario(driver: Driver) -> None:
        file = kept(driver, old)
        healthy, slow = driver.executors[TierName.SSD], SlowExecutor(file)
        driver.executors[TierName.SSD] = slow  # type: ignore[assignment]  # as much of one as is used
        await file.save(content(1, "ours"))
        assert (names(old), names(new)) == ({NAME}, set())
        driver.executors[TierName.SSD] = healthy
        await file.save(content(1, "ours"))
        assert names(new) == {NAME}

    in_loop(scenario)


def test_a_disk_that_is_read_only_for_days_is_said_once_in_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(driver: Driver) -> None:
        file = kept(driver, tmp_path / "gone")
        for number in range(20):
            await file.save(content(1, f"state {number}"))

    with caplog.at_level(logging.WARNING, "kvtier.daemon"):
        in_loop(scenario)
    said = [r.getMessage() for r in caplog.records if r.name == "kvtier.daemon"]
    assert said == ["learned state cannot be saved"]
