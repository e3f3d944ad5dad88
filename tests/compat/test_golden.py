"""What released versions wrote and said, against this one. golden/ is written by record.py."""

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.core.identity import FORMAT_VERSION
from kvtier.testing.child import work_directory
from kvtier.testing.running_node import RunningNode
from kvtier.tiers.ssd import segment
from kvtier.wire.convert import OLDEST_PROTOCOL, PROTOCOL, agreed_protocol
from tests.compat.record import NUM_BLOCKS, PROMPT, SETTINGS, SPACE
from tests.compat.surface import GOLDEN, surface_of_protocol
from tests.integration.pattern import PatternEngine
from tests.integration.redis_child import RedisServer

STORE = GOLDEN / f"segment-{segment._FORMAT_VERSION}.tar.gz"
VALUES = GOLDEN / f"header-{FORMAT_VERSION}.json"


@pytest.fixture
def directory() -> Iterator[Path]:
    with work_directory() as made:
        yield made


# The protocol


@pytest.mark.parametrize("number", range(OLDEST_PROTOCOL, PROTOCOL + 1))
def test_what_an_older_side_says_still_means_the_same(number: int) -> None:
    before = json.loads((GOLDEN / f"protocol-{number}.json").read_text())
    now = surface_of_protocol()
    for name, fields in before["messages"].items():
        there = now["messages"].get(name, {})
        kept = {field: there.get(field) for field in fields}
        assert kept == fields, f"{name} has lost or changed a field; that takes another protocol"
    assert set(before["calls"]) <= set(now["calls"])
    assert before["header"] == now["header"], "a client and a daemon compute checksums alike"


def test_a_new_word_takes_a_new_protocol() -> None:
    recorded = json.loads((GOLDEN / f"protocol-{PROTOCOL}.json").read_text())
    assert recorded["words"] == surface_of_protocol()["words"], (
        "an older client cannot read this: raise PROTOCOL, say the word only to who agreed on it, "
        "and run tests.compat.record"
    )


@pytest.mark.parametrize(
    ("newest", "oldest", "agreed"),
    [
        (PROTOCOL, OLDEST_PROTOCOL, PROTOCOL),
        (PROTOCOL, 0, PROTOCOL),
        (PROTOCOL + 5, PROTOCOL, PROTOCOL),
        (PROTOCOL, PROTOCOL + 1, PROTOCOL),
    ],
    ids=["the same", "one alone", "a newer one that speaks ours", "nonsense of the oldest"],
)
def test_the_newest_that_both_speak(newest: int, oldest: int, agreed: int) -> None:
    assert agreed_protocol(newest, oldest) == agreed


@pytest.mark.parametrize(
    ("newest", "oldest", "said"),
    [
        (PROTOCOL + 3, PROTOCOL + 1, f"protocol {PROTOCOL + 1} to {PROTOCOL + 3} and the daemon"),
        (PROTOCOL + 1, 0, "upgrade kvtier in the daemon"),
        (OLDEST_PROTOCOL - 1, 1, "upgrade kvtier in the engine"),
        (0, 0, "upgrade kvtier in the engine"),
    ],
)
def test_where_there_is_none_it_is_said_whom_to_upgrade(
    newest: int, oldest: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        agreed_protocol(newest, oldest)


# What is kept


@pytest.mark.slow
def test_a_store_of_before_is_served(directory: Path) -> None:
    node = RunningNode(directory, SETTINGS)
    with tarfile.open(STORE) as archive:
        archive.extractall(directory / "ssd", filter="data")
    with node.daemon() as daemon, PatternEngine(node.socket, SPACE) as engine:
        assert engine.load(PROMPT, NUM_BLOCKS) == (["ssd"] * NUM_BLOCKS, "complete")
        assert "cannot be read" not in daemon.log, "learned.json and key_spaces.json can"
        assert daemon.stop() == 0
    code, report = node.fsck()
    assert (code, report["live_blocks"]) == (0, NUM_BLOCKS)


@pytest.mark.slow
@pytest.mark.redis
def test_values_of_before_are_served(directory: Path) -> None:
    server = RedisServer(directory)
    node = RunningNode(directory, SETTINGS | {"remote.url": server.url})
    with server.start():
        with server.client() as client:
            for key, value in json.loads(VALUES.read_text()).items():
                client.set(key, bytes.fromhex(value), ex=600)
        with node.daemon(), PatternEngine(node.socket, SPACE) as engine:
            engine.lookup(PROMPT, NUM_BLOCKS)  # which asks the server for what is missing here
            assert engine.load(PROMPT, NUM_BLOCKS) == (["remote"] * NUM_BLOCKS, "complete")
