"""What blocks are known by: files by their content, requests by all that decides their KV."""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.connectors.kit.adapters import AdapterFingerprints
from kvtier.connectors.kit.weights import (
    FileDigests,
    WeightsFingerprint,
    began_ns,
    fingerprint,
    hub_snapshot,
    model_files,
)
from kvtier.connectors.vllm.block_identity import adapter_of, can_be_named, extra_keys
from kvtier.core.identity import chain_root, hash_blocks
from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode
from tests.vllm.small_vllm import SmallVllm, request

LATER_NS = time.time_ns() + 3600 * 10**9
"""A vLLM that began after all that a test writes."""

LARGE = 17 << 20
PICTURE, ANOTHER = hashlib.sha256(b"cat").hexdigest(), hashlib.sha256(b"dog").hexdigest()


def save_model(folder: Path, content: bytes = b"weights", name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / name).write_bytes(content)
    (folder / "config.json").write_text("{}")
    return folder


def known_as(folder: Path, since_ns: int = LATER_NS) -> bytes:
    return fingerprint("weights", model_files(folder), since_ns, FileDigests())


# Weights


def test_weights_are_known_by_their_content(tmp_path: Path) -> None:
    first = known_as(save_model(tmp_path / "one"))
    assert known_as(save_model(tmp_path / "two")) == first
    assert known_as(save_model(tmp_path / "three", b"weightz")) != first


def test_the_same_on_any_machine(tmp_path: Path) -> None:
    """A change of these values makes all that was stored before unknown."""
    golden = "f03e983fdd0a20fe753525744198930e4131bb24c60656ae5ba719b0ab3aaec4"
    assert known_as(save_model(tmp_path / "one")).hex() == golden
    asked = request("r", [], mm_features=[medium("ab" * 32, 60, 8)])
    assert extra_keys(asked, b"a", 64) == {
        0: b'[["adapter", "61"], ["medium", "image", "%s", 60, 8]]' % (b"ab" * 32),
        1: b'[["medium", "image", "%s", -4, 8]]' % (b"ab" * 32),
    }


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("model.safetensors.index.json", True),
        ("hf_quant_config.json", True),
        ("preprocessor_config.json", True),
        ("modeling_own.py", True),
        ("tokenizer.json", False),
        ("generation_config.json", False),
        ("README.md", False),
    ],
)
def test_what_lies_beside_the_weights(tmp_path: Path, name: str, counts: bool) -> None:
    folder = save_model(tmp_path / "model")
    before = known_as(folder)
    (folder / name).write_text("other")
    assert (known_as(folder) != before) == counts


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pt"])
def test_older_kinds_of_files(tmp_path: Path, name: str) -> None:
    one = known_as(save_model(tmp_path / "one", b"a", name))
    assert known_as(save_model(tmp_path / "two", b"b", name)) != one


@pytest.mark.parametrize("name", ["model.bin", "a.pt", "part/model.safetensors", "part/a.json"])
def test_all_weights_count_whichever_vllm_reads(tmp_path: Path, name: str) -> None:
    folder = save_model(tmp_path / "model")
    (folder / "part").mkdir()
    known = {known_as(folder)}
    for content in ("a", "b"):
        (folder / name).write_text(content)
        known.add(known_as(folder))
    (folder / "other").mkdir()
    (folder / name).rename(folder / "other" / Path(name).name)
    known.add(known_as(folder))
    assert len(known) == 4, "without it, with one content or another, and in another place"


@pytest.mark.parametrize("name", ["original", "checkpoint-500", ".cache"])
def test_what_no_model_reads_is_not_read(tmp_path: Path, name: str) -> None:
    folder = save_model(tmp_path / "model")
    before = known_as(folder)
    save_model(folder / name, b"other")
    assert known_as(folder) == before


def test_a_link_to_a_part_is_followed_but_not_in_a_circle(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    for part in ("a", "b"):
        save_model(folder / part, part.encode())
    (folder / "a" / "above").symlink_to(folder)
    known = set()
    for part in ("a", "b"):
        (folder / "part").symlink_to(part)
        known.add(known_as(folder))
        (folder / "part").unlink()
    assert len(known) == 2


@pytest.mark.parametrize(("num_folders", "num_files"), [(300, 0), (0, 4100)])
def test_a_folder_that_is_no_models_is_not_searched_for_long(
    tmp_path: Path, num_folders: int, num_files: int
) -> None:
    folder = save_model(tmp_path / "model")
    for number in range(num_folders):
        (folder / str(number)).mkdir()
    for number in range(num_files):
        (folder / f"{number}.json").touch()
    with pytest.raises(ValueError, match="has more than 256 directories or 4096 files"):
        model_files(folder)


def test_a_model_that_is_one_file(tmp_path: Path) -> None:
    assert known_as(save_model(tmp_path) / "model.safetensors")


def test_a_model_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no weight files"):
        model_files(tmp_path)


def test_files_that_changed_after_vllm_began_are_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    with pytest.raises(ValueError, match="safetensors has changed since the engine started"):
        known_as(folder, since_ns=time.time_ns() - 3600 * 10**9)
    assert known_as(folder)
    # Whoever puts the old time back does not hide the change.
    now_ns = time.time_ns()
    await_true(lambda: _touched_ns(folder / "probe") > now_ns, "the file system's clock goes on")
    told = (folder / "model.safetensors").stat()
    (folder / "model.safetensors").write_bytes(b"weightz")
    os.utime(folder / "model.safetensors", ns=(told.st_atime_ns, told.st_mtime_ns))
    with pytest.raises(ValueError, match="has changed since the engine started"):
        known_as(folder, since_ns=now_ns)


def test_a_link_that_was_set_anew_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "v1", b"one")
    save_model(tmp_path / "v2", b"two")
    now_ns = time.time_ns()
    await_true(lambda: _touched_ns(tmp_path / "probe") > now_ns, "the file system's clock goes on")
    (tmp_path / "current").symlink_to("v2")
    assert known_as(tmp_path / "v2", since_ns=now_ns)
    with pytest.raises(ValueError, match="has changed since the engine started"):
        known_as(tmp_path / "current", since_ns=now_ns)


def _touched_ns(path: Path) -> int:
    path.touch()
    return path.stat().st_ctime_ns


@pytest.mark.parametrize("is_git", [False, True])
def test_what_the_hub_has_just_brought_counts_by_its_content(tmp_path: Path, is_git: bool) -> None:
    content = b"weights"
    whole = b"blob %d\0" % len(content) + content
    name = hashlib.sha1(whole).hexdigest() if is_git else hashlib.sha256(content).hexdigest()
    blob = tmp_path / "blobs" / name
    snapshot = tmp_path / "snapshots" / "abc"
    for folder in (blob.parent, snapshot):
        folder.mkdir(parents=True)
    blob.write_bytes(content)
    (snapshot / "model.safetensors").symlink_to(blob)
    assert known_as(snapshot, since_ns=1)
    blob.write_bytes(b"trained")  # through the link, as a program saves its work
    with pytest.raises(ValueError, match="has changed since the engine started"):
        known_as(snapshot, since_ns=1)
    assert known_as(snapshot)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="is not a regular file"):
        known_as(tmp_path)


COMMITS = ("0" * 40, "1" * 40)


def save_hub(cache: Path, commits: tuple[str, ...]) -> Path:
    """Make a cache of the hub's, in which the last commit is the newest, and return its model."""
    model = cache / "models--org--m"
    (model / "refs").mkdir(parents=True)
    for commit in commits:
        save_model(model / "snapshots" / commit, commit.encode())
        (model / "refs" / "main").write_text(commit)
    return model


@pytest.mark.parametrize(
    ("commits", "revision", "since_ns", "found"),
    [
        (COMMITS[:1], None, 1, COMMITS[0]),  # fetched by this very start
        (COMMITS, None, LATER_NS, COMMITS[1]),
        (COMMITS, "main", LATER_NS, COMMITS[1]),
        (COMMITS, COMMITS[0], 1, COMMITS[0]),  # a commit is what it is
    ],
    ids=["fetched now", "newest", "branch", "commit"],
)
def test_a_name_of_the_hub_leads_to_its_cache(
    tmp_path: Path, commits: tuple[str, ...], revision: str | None, since_ns: int, found: str
) -> None:
    save_hub(tmp_path, commits)
    assert hub_snapshot("org/m", revision, str(tmp_path), since_ns).name == found


def test_a_name_that_means_another_commit_by_now_is_refused(tmp_path: Path) -> None:
    save_hub(tmp_path, COMMITS)
    with pytest.raises(ValueError, match="refs/main has changed since the engine started"):
        hub_snapshot("org/m", None, str(tmp_path), since_ns=1)


def test_a_name_that_is_not_in_the_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError):  # noqa: PT011 - the hub's words
        hub_snapshot("org/other", None, str(tmp_path), LATER_NS)


# The record of digests


class CountedReads:
    def __init__(self) -> None:
        self.num_bytes = 0

    def __call__(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes


@pytest.fixture
def large(tmp_path: Path) -> Path:
    return save_model(tmp_path / "large", bytes(LARGE)) / "model.safetensors"


def forge(record: Path, digest: str = "f" * 64) -> None:
    """Have a record say something else of all it knows: whoever believes it shows that."""
    known = json.loads(record.read_text())
    record.write_text(json.dumps(dict.fromkeys(known, digest)))


def test_large_files_are_read_once(tmp_path: Path, large: Path) -> None:
    record = tmp_path / "cache" / "weights.json"
    digest = FileDigests(record).digest(large)
    assert record.stat().st_mode & 0o777 == 0o600
    forge(record)
    assert FileDigests(record).digest(large) == "f" * 64
    with large.open("r+b") as file:  # in place: the same inode and size
        file.seek(LARGE // 2)
        file.write(b"\1")
    assert FileDigests(record).digest(large) not in {digest, "f" * 64}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda record: record.write_text("{"),
        lambda record: record.write_text("[" * 100_000),
        lambda record: record.write_text('["a"]'),
        lambda record: forge(record, "not a digest"),
        lambda record: record.write_bytes(b"\xff\xfe"),
        lambda record: record.write_text(" " * (5 << 20)),
        lambda record: record.chmod(0o666),
        lambda record: (record.unlink(), record.mkdir()),
        lambda record: (record.unlink(), os.mkfifo(record)),
    ],
)
def test_a_record_that_cannot_be_used_is_ignored(
    tmp_path: Path, large: Path, spoil: Callable[[Path], object]
) -> None:
    record = tmp_path / "weights.json"
    digest = FileDigests(record).digest(large)
    forge(record)
    spoil(record)
    assert FileDigests(record).digest(large) == digest


def test_a_record_that_cannot_be_written_is_done_without(tmp_path: Path, large: Path) -> None:
    (tmp_path / "file").write_text("")
    assert FileDigests(tmp_path / "file" / "weights.json").digest(large)


def test_several_at_a_time_keep_one_whole_record(tmp_path: Path) -> None:
    record = tmp_path / "weights.json"
    files = [
        save_model(tmp_path, bytes([n]) * LARGE, f"{n}.safetensors") / f"{n}.safetensors"
        for n in range(4)
    ]
    assert fingerprint("weights", files, LATER_NS, FileDigests(record))
    assert len(json.loads(record.read_text())) == 4
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("weights.json.")] == []


def test_reading_ends_when_vllm_does(large: Path) -> None:
    digests = FileDigests()
    digests.end()
    with pytest.raises(OSError, match="the engine is shutting down"):
        digests.digest(large)


def test_a_fingerprint_is_taken_on_the_side(tmp_path: Path) -> None:
    folder, gate = save_model(tmp_path / "model"), threading.Event()

    def find() -> Path:
        assert gate.wait(10)
        return folder

    taken = WeightsFingerprint(find, LATER_NS, FileDigests())
    taken.start()
    assert not taken.wait(0)
    assert taken.weights == b""
    gate.set()
    assert taken.wait(10)
    assert taken.weights == known_as(folder)


@pytest.mark.parametrize("fault", [ValueError("no folder"), OSError("no disk"), KeyError("bug")])
def test_weights_that_cannot_be_told_are_refused(
    fault: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def find() -> Path:
        raise fault

    taken = WeightsFingerprint(find, LATER_NS, FileDigests())
    taken.start()
    assert taken.wait(10)
    assert str(fault.args[0]) in taken.refusal
    assert taken.weights == b""


def test_a_start_is_before_all_that_is_done_in_it() -> None:
    assert 0 < began_ns() < time.time_ns()


# Adapters


def save_adapter(folder: Path, content: bytes = b"low rank") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


class LoRARequest(SimpleNamespace):
    """As vLLM has it."""

    def __init__(self, path: Path | str, name: str = "sql", number: int = 1, **more: Any) -> None:
        super().__init__(lora_name=name, lora_int_id=number, lora_path=str(path), **more)


class OwnRequest(LoRARequest):
    """As programs have it that bring weights in memory."""


@pytest.fixture
def adapters() -> Iterator[AdapterFingerprints]:
    made = AdapterFingerprints(FileDigests(), LATER_NS)
    yield made
    made.close()


def answer(adapters: AdapterFingerprints, adapter: Any, name: str = "r") -> bytes | None:
    adapters.ask(name, adapter_of(adapter))
    await_true(lambda: not adapters.is_pending(name), "the answer is there, or too late")
    return adapters.take(name)


def test_adapters_are_known_by_their_content(tmp_path: Path, adapters: AdapterFingerprints) -> None:
    one = save_adapter(tmp_path / "one")
    known = answer(adapters, LoRARequest(one))
    assert known
    copy = LoRARequest(save_adapter(tmp_path / "two"), "other name", 2)
    assert answer(adapters, copy) == known
    other = LoRARequest(save_adapter(tmp_path / "three", b"high rank"), "third name", 3)
    assert answer(adapters, other) not in {known, None}
    fused = LoRARequest(one, "sql", 1, is_3d_lora_weight=True)
    assert answer(adapters, fused) not in {known, None}
    tensorized = LoRARequest(one, "tensorized", 4, tensorizer_config_dict={"dir": "s3://b"})
    assert answer(adapters, tensorized) is None


def test_an_adapter_that_changes_is_no_more_cached(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "one")
    now_ns = time.time_ns()
    await_true(lambda: _touched_ns(tmp_path / "probe") > now_ns, "the file system's clock goes on")
    adapters = AdapterFingerprints(FileDigests(), now_ns)
    assert answer(adapters, LoRARequest(folder))
    save_adapter(folder, b"trained on")
    assert answer(adapters, LoRARequest(folder)) is None
    adapters.close()


def test_a_number_that_names_two_adapters_is_not_believed(
    tmp_path: Path, adapters: AdapterFingerprints
) -> None:
    first, second = save_adapter(tmp_path / "one"), save_adapter(tmp_path / "two")
    assert answer(adapters, LoRARequest(first, "first", 1))
    assert answer(adapters, LoRARequest(second, "second", 2))
    assert answer(adapters, LoRARequest(second, "second", 1)) is None
    assert answer(adapters, LoRARequest(first, "first", 1)) is None
    assert answer(adapters, LoRARequest(second, "second", 2)) is None, "nor is the name clean"
    assert answer(adapters, LoRARequest(second, "third", 3))


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_name_that_names_two_adapters_is_not_believed(
    tmp_path: Path, adapters: AdapterFingerprints, is_asked: bool
) -> None:
    """Older releases of vLLM hit their own blocks by it, which may be the first one's."""
    first, second = save_adapter(tmp_path / "one"), save_adapter(tmp_path / "two", b"other")
    if is_asked:
        assert answer(adapters, LoRARequest(first, "sql", 1))
    else:  # as before the weights of the model are known
        assert adapters.note(adapter_of(LoRARequest(first, "sql", 1))) == ""
    assert answer(adapters, LoRARequest(second, "sql", 2)) is None
    assert answer(adapters, LoRARequest(first, "sql", 3)) is None
    assert answer(adapters, LoRARequest(second, "sql2", 4))


def test_an_adapter_after_one_that_could_not_be_told_is_not_believed(
    tmp_path: Path, adapters: AdapterFingerprints
) -> None:
    folder = save_adapter(tmp_path / "one")
    assert answer(adapters, OwnRequest(folder, "sql", 1)) is None
    assert answer(adapters, LoRARequest(folder, "sql", 2)) is None


def test_names_that_are_remembered_are_bounded(adapters: AdapterFingerprints) -> None:
    for number in range(1, 5000):
        told = adapters.note(adapter_of(LoRARequest("/a", f"n{number}", number)))
        assert bool(told) == (number > 1024)
    assert adapters.note(adapter_of(LoRARequest("/a", "n7", 7))) == ""
    assert adapters.note(adapter_of(LoRARequest("/b", "n7", 5000)))
    assert adapters.note(adapter_of(LoRARequest("/a", "n7", 7))), (
        "it is noted of those that are known"
    )


@pytest.mark.parametrize("kind", ["nowhere", "empty", "only weights", "too many", "own"])
def test_adapters_that_cannot_be_told(
    tmp_path: Path, adapters: AdapterFingerprints, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "adapter"
    adapter = LoRARequest(folder)
    if kind != "nowhere":
        save_adapter(folder)
    if kind == "empty":
        (folder / "adapter_model.safetensors").unlink()
    if kind == "only weights":
        (folder / "adapter_config.json").unlink()
    if kind == "too many":
        for number in range(100):
            (folder / f"{number}.bin").touch()
    if kind == "own":
        adapter = OwnRequest(folder)
    for number in range(3):
        assert answer(adapters, adapter, f"r{number}") is None
    said = [record.message for record in caplog.records]
    assert said == ["an adapter is not cached"], "it is said once"


def test_a_request_is_not_waited_for_long(tmp_path: Path) -> None:
    now_s = 100.0
    adapters = AdapterFingerprints(FileDigests(), LATER_NS, lambda: now_s)
    gate = threading.Event()
    assert adapters._reader.submit(gate.wait, 10)  # a file system that hangs
    adapters.ask("r", adapter_of(LoRARequest(save_adapter(tmp_path / "one"))))
    assert adapters.is_pending("r")
    now_s += 0.3
    assert not adapters.is_pending("r")
    assert adapters.take("r") is None
    gate.set()
    adapters.close()


def test_a_file_system_that_hangs_is_asked_a_bounded_number_of_times(tmp_path: Path) -> None:
    adapters, gate = AdapterFingerprints(FileDigests(), LATER_NS), threading.Event()
    adapter = LoRARequest(save_adapter(tmp_path / "one"))
    assert adapters._reader.submit(gate.wait, 30)
    for number in range(300):
        adapters.ask(f"r{number}", adapter_of(adapter))
        if number < 290:
            adapters.forget(f"r{number}")
    assert not adapters.is_pending("r299"), "it is not asked about, and not waited for"
    gate.set()
    await_true(lambda: answer(adapters, adapter), "it is asked again")
    adapters.close()


def test_what_is_not_asked_about_is_not_waited_for(adapters: AdapterFingerprints) -> None:
    assert not adapters.is_pending("r")
    assert adapters.take("r") is None
    adapters.forget("r")


# Media


def medium(identifier: str, offset: int, length: int = 40, modality: str = "image") -> Any:
    place = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=identifier, mm_position=place, modality=modality)


def hashes(*media: Any, adapter: bytes = b"", num_tokens: int = 320) -> list[bytes]:
    asked = request("r", [7] * num_tokens, mm_features=list(media))
    root = chain_root(bytes(16), bytes(16))
    return list(hash_blocks(root, asked.all_token_ids, 64, extra_keys(asked, adapter, 64)))


def test_two_pictures_are_two_prompts() -> None:
    cat, dog, none = hashes(medium(PICTURE, 70)), hashes(medium(ANOTHER, 70)), hashes()
    assert cat == hashes(medium(PICTURE, 70))
    assert cat[0] == dog[0] == none[0], "before the picture all is the same"
    assert len({cat[1], dog[1], none[1]}) == len({cat[4], dog[4], none[4]}) == 3


def test_the_place_of_a_picture_counts() -> None:
    assert hashes(medium(PICTURE, 70))[1] != hashes(medium(PICTURE, 71))[1]
    both = hashes(medium(PICTURE, 0), medium(ANOTHER, 40))
    assert both[0] != hashes(medium(ANOTHER, 0), medium(PICTURE, 40))[0]


def test_a_picture_counts_in_each_block_it_reaches_into() -> None:
    keys = extra_keys(request("r", [], mm_features=[medium(PICTURE, 60, 70)]), b"", 64)
    assert sorted(keys) == [0, 1, 2]
    exact = extra_keys(request("r", [], mm_features=[medium(PICTURE, 64, 64)]), b"", 64)
    assert sorted(exact) == [1]


def test_an_adapter_counts_from_the_first_block_on() -> None:
    plain, first, second = hashes(), hashes(adapter=b"a" * 32), hashes(adapter=b"b" * 32)
    assert all(len({*each}) == 3 for each in zip(plain, first, second, strict=True))
    assert first == hashes(adapter=b"a" * 32)


def test_an_adapter_is_no_medium() -> None:
    named = medium(b"x".hex(), 0)
    assert hashes(named, adapter=b"") != hashes(adapter=b"x")


@pytest.mark.parametrize(
    ("fields", "is_named"),
    [
        ({}, True),
        ({"mm_features": [medium(PICTURE, 0)]}, True),
        ({"mm_features": [medium("a" * 128, 0)]}, True),
        ({"mm_features": [medium(f"sql:{PICTURE}", 0)]}, True),
        ({"mm_features": [medium("image-1", 0)]}, False),
        ({"mm_features": [medium("cmpl-1-image-0", 0)]}, False),
        ({"mm_features": [medium(PICTURE, 0), medium(PICTURE[:-1], 50)]}, False),
        ({"mm_features": [medium("", 0)]}, False),
        ({"prompt_embeds": object()}, False),
        ({"resumable": True}, False),
    ],
)
def test_requests_that_cannot_be_named(fields: dict[str, Any], is_named: bool) -> None:
    assert can_be_named(request("r", [1], **fields)) == is_named


@pytest.mark.slow
def test_one_picture_is_never_served_for_another() -> None:
    tokens, blocks = [7] * 300, list(range(1, 20))
    with work_directory() as directory:
        node = RunningNode(directory)
        with node.daemon(), SmallVllm(node.socket) as small:

            def loaded(*media: Any) -> int:
                return small.prefill(tokens, blocks, mm_features=list(media))[0]

            assert loaded(medium(PICTURE, 70)) == 0
            assert loaded(medium(PICTURE, 70)) == 256
            assert loaded(medium(ANOTHER, 70)) == 64, "as far as the picture"
            assert loaded(medium(PICTURE, 71)) == 64
            assert loaded() == 64
            assert loaded(medium("image-1", 70)) == 0
            node.await_idle()
