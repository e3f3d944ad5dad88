"""``kvtier drop`` of a tenant or a model, in every tier, and the names that models are known by."""

import json
import subprocess
from collections.abc import Iterator, Mapping

import pytest

from kvtier.api.http.tenant import key_salt
from kvtier.core.identity import NO_TENANT, KeySpace, tenant_digest
from kvtier.testing.child import await_true, kvtier_command, work_directory
from kvtier.testing.running_node import RunningNode
from tests.integration.pattern import PatternEngine, key_space

pytestmark = [pytest.mark.slow, pytest.mark.redis]

FILE = "key_spaces.json"
SPACES: Mapping[str, KeySpace] = {
    "kvtier llama": key_space('{"model":"llama"}'),
    "kvtier qwen": key_space('{"model":"qwen"}', block_bytes=4096),
}


@pytest.fixture
def node(redis_server: str) -> Iterator[RunningNode]:
    with work_directory() as directory:
        prefix = f"{directory.name}:"
        settings = {"remote.url": redis_server, "remote.key_prefix": prefix}
        yield RunningNode(directory, settings | {"remote.min_tokens": "0"})


def engine(node: RunningNode, name: str, tenant: bytes = NO_TENANT) -> PatternEngine:
    return PatternEngine(node.socket, SPACES[name], tenant, name=name)


def drop(node: RunningNode, *options: str, answer: str = "") -> dict[str, int]:
    """Drop from all tiers, and return the blocks that each one lost."""
    command = kvtier_command(
        *("drop", "--socket", str(node.socket), "--tier", "all", "--json"), *options
    )
    told = subprocess.run(command, check=False, capture_output=True, text=True, input=answer)
    assert told.returncode == 0, told.stdout + told.stderr
    return {each["tier"]: each["blocks"] for each in json.loads(told.stdout)["removed"]}


def refusal(node: RunningNode, *options: str) -> str:
    command = kvtier_command("drop", "--socket", str(node.socket), "--tier", "cpu", *options)
    told = subprocess.run(command, check=False, capture_output=True, text=True)
    assert told.returncode == 2, told.stdout
    assert told.stderr.count("\n") == 1
    return told.stderr


def filled(node: RunningNode, *who: tuple[str, bytes]) -> None:
    """Have each engine and tenant store six blocks, and wait until every tier has them."""
    before = node.stat()["tiers"]
    for name, tenant in who:
        with engine(node, name, tenant) as client:
            assert client.store(1, 6) == 6
    for tier in ("ssd", "remote"):
        node.await_blocks(tier, before[tier]["blocks"] + 6 * len(who))


ALICE, BOB = tenant_digest("alice"), tenant_digest(key_salt("bob's secret key"))


def test_a_tenant_is_dropped_from_every_tier_and_others_are_not(node: RunningNode) -> None:
    who = [("kvtier llama", ALICE), ("kvtier qwen", ALICE), ("kvtier llama", BOB)]
    with node.daemon():
        filled(node, *who, ("kvtier llama", NO_TENANT))
        gone = {"gpu": 0, "cpu": 12, "ssd": 12, "remote": 12}
        assert drop(node, "--tenant", "alice") == gone
        assert drop(node, "--tenant", "alice") == dict.fromkeys(gone, 0)
        for name, tenant in who[:2]:
            with engine(node, name, tenant) as client:
                assert client.lookup(1, 6) == ([], "absent")
        assert drop(node, "--tenant-key-file", "-", answer="bob's secret key\n")["ssd"] == 6
        assert drop(node, "--tenant-digest", NO_TENANT.hex())["remote"] == 6
        assert node.stat()["tiers"]["ssd"]["blocks"] == 0
    with node.daemon():
        assert node.stat()["tiers"]["ssd"]["blocks"] == 0


def test_a_model_is_dropped_by_the_name_it_had_before_a_restart(node: RunningNode) -> None:
    with node.daemon() as daemon:
        filled(node, ("kvtier llama", ALICE), ("kvtier qwen", ALICE), ("kvtier llama", BOB))
        saved = node.directory / "ssd" / FILE
        await_true(lambda: saved.exists() and "qwen" in saved.read_text(), "names are saved")
        assert saved.stat().st_mode & 0o777 == 0o600
        assert daemon.stop() == 0
    with node.daemon() as daemon:
        spaces = {space["names"][0]: space for space in node.stat()["key_spaces"]}
        assert spaces["kvtier llama"]["key_space"] == SPACES["kvtier llama"].digest.hex()
        assert spaces["kvtier llama"]["tiers"]["ssd"] == {"blocks": 12, "bytes": 12 * 8192}
        assert spaces["kvtier qwen"]["tiers"]["ssd"] == {"blocks": 6, "bytes": 6 * 4096}
        assert "is empty" in refusal(node, "--model", "")
        said = refusal(node, "--model", "gpt")
        assert "'gpt'" in said
        assert "'kvtier llama', 'kvtier qwen'" in said
        assert drop(node, "--model", "llama", "--tenant", "alice")["ssd"] == 6
        assert drop(node, "--model", "kvtier llama") == {
            "gpu": 0, "cpu": 0, "ssd": 6, "remote": 6,
        }  # fmt: skip
        digits = SPACES["kvtier qwen"].digest.hex()[:8]
        assert drop(node, "--key-space", digits)["ssd"] == 6
        assert node.stat()["key_spaces"] == []
        assert "llama" in saved.read_text()
        drop(node)
        await_true(lambda: not saved.exists(), "with everything the names are forgotten")
        assert daemon.stop() == 0


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--tenant", ""), "is empty"),
        (("--tenant-digest", "abc"), "32 hexadecimal digits"),
        (("--tenant-digest", "xy" * 16), "32 hexadecimal digits"),
        (("--key-space", "abcdef"), "matches no key space"),
        (("--model", ""), "is empty"),
        (("--model", "nobody"), "no engine has attached yet"),
        (("--tenant-key-file", "/nowhere"), "cannot read"),
    ],
)
def test_what_names_nobody_is_refused(
    shared_node: RunningNode, options: tuple[str, ...], part: str
) -> None:
    assert part in refusal(shared_node, *options)


@pytest.fixture(scope="module")
def shared_node() -> Iterator[RunningNode]:
    with work_directory() as directory:
        node = RunningNode(directory)
        with node.daemon():
            yield node


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"version": 1}', b"\xff" * 100, b"1" * 2**21])
def test_a_file_of_names_that_is_no_good_hurts_nobody(content: bytes) -> None:
    with work_directory() as directory:
        node = RunningNode(directory)
        (directory / "ssd").mkdir(mode=0o700)
        (directory / "ssd" / FILE).write_bytes(content)
        with node.daemon() as daemon, PatternEngine(node.socket) as client:
            daemon.await_log("names of key spaces cannot be read")
            client.store(1, 4)
            node.await_blocks("ssd", 4)
            saved = directory / "ssd" / FILE
            await_true(lambda: b"pattern" in saved.read_bytes(), "a good one replaces it")


def test_names_are_bounded() -> None:
    from kvtier.daemon.persistence.key_spaces import KeySpaces

    spaces = KeySpaces()
    for number in range(1000):
        assert spaces.note(number.to_bytes(16, "big"), f"engine {number} " + "x" * 500, 64)
    for number in range(20):
        spaces.note((999).to_bytes(16, "big"), f"name {number}", 64)
    assert not spaces.note((999).to_bytes(16, "big"), "name 19", 64), "that is known"
    known = dict(spaces)
    assert len(known) == 100
    assert known[(999).to_bytes(16, "big")].names == ("name 19", "name 18", "name 17", "name 16")
    assert len(spaces.document()) < 64 << 10, "small beside any segment"
    for number in range(100):
        spaces.note(number.to_bytes(16, "big"), "\N{SNOWMAN}" * 100 + str(number), 64)
        spaces.note(number.to_bytes(16, "big"), "\N{COMET}" * 100, 64)
    assert 50_000 < len(spaces.document()) <= 64 << 10, "whatever names are written in"
