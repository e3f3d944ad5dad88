"""Traces: every format, what is refused and how, and what is known of the future."""

import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import StartError
from kvtier.sim.replay.setup import with_hints
from kvtier.sim.replay.trace import NEVER, Trace, continuations, next_uses, optimal_hits
from kvtier.sim.replay.trace_reader import ReadOptions, read_trace
from kvtier.sim.replay.traffic import with_cycle, with_noise

MOONCAKE = (
    {"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [0, 3]},
)


def written(path: Path, *rows: object) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    text = "\n".join(lines) + "\n"
    if path.suffix == ".xz":
        path.write_bytes(lzma.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def plain(tmp_path: Path, chains: list[list[int]], step_s: float = 1.0) -> Trace:
    """A trace of our own format with hashes of 16 tokens."""
    rows = [
        {"timestamp_s": n * step_s, "hash_ids": ids, "input_length": 16 * len(ids) + 1}
        for n, ids in enumerate(chains)
    ]
    return read_trace(written(tmp_path / "t.jsonl", *rows), ReadOptions(hash_tokens=16))


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.xz"])
def test_mooncake_has_milliseconds_and_hashes_of_512_tokens(tmp_path, name):
    trace = read_trace(written(tmp_path / name, *MOONCAKE))
    assert trace.name == "t.jsonl"
    assert trace.block_tokens == 512
    assert [request.at_ns for request in trace.requests] == [0, 3_000_000_000]
    # The third hash of the later request is of a partial block.
    assert [len(request.blocks) for request in trace.requests] == [2, 2]
    assert trace.requests[0].blocks[0] == trace.requests[1].blocks[0]
    assert trace.requests[0].blocks[1] != trace.requests[1].blocks[1]
    assert trace.num_distinct == 3
    assert len(set(map(bytes, trace.keys))) == 3


def test_larger_blocks_are_groups_of_hashes_and_a_group_that_is_cut_has_none(tmp_path):
    trace = read_trace(written(tmp_path / "t.jsonl", *MOONCAKE), ReadOptions(block_tokens=1024))
    assert [len(request.blocks) for request in trace.requests] == [1, 1]
    assert trace.num_distinct == 2


def test_the_same_hash_behind_another_one_is_another_block(tmp_path):
    trace = plain(tmp_path, [[1, 2], [3, 2]])
    assert trace.num_distinct == 4


def test_bailian_has_seconds_and_hashes_of_16_tokens(tmp_path):
    row = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.25, "input_length": 40}
    row |= {"output_length": 1, "type": "text", "turn": 1, "hash_ids": [5, 6, 7]}
    later = row | {"timestamp": 63}
    trace = read_trace(written(tmp_path / "t.jsonl", row, later), ReadOptions(block_tokens=32))
    assert trace.block_tokens == 32
    assert trace.requests[1].at_ns == 1_750_000_000
    assert trace.requests[0].kind == "text"
    assert len(trace.requests[0].blocks) == 1


def test_text_without_a_tokenizer_is_cut_into_four_bytes_and_says_so(tmp_path):
    begin = "a" * 512
    rows = [{"timestamp": n, "input": begin + end, "output": "x"} for n, end in enumerate("bc")]
    trace = read_trace(written(tmp_path / "t.jsonl", *rows))
    assert trace.block_tokens == 64
    assert trace.requests[0].num_tokens == 129
    assert [*trace.requests[0].blocks] == [*trace.requests[1].blocks]
    assert "tokenizer" in trace.notes[0]


def test_text_with_a_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = written(tmp_path / "t.jsonl", {"timestamp": 1, "input": "a b a b b"})
    options = ReadOptions(block_tokens=2, tokenizer=tmp_path / "tokenizer.json")
    trace = read_trace(path, options)
    assert trace.requests[0].num_tokens == 5
    assert len(trace.requests[0].blocks) == 2
    assert not trace.notes
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartError, match="--tokenizer"):
        read_trace(path, options)


def test_azure_has_no_reuse_and_says_so(tmp_path):
    rows = ("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900,374,44")
    trace = read_trace(written(tmp_path / "t.csv", *rows, rows[1]))
    assert [len(request.blocks) for request in trace.requests] == [5, 5]
    assert trace.num_distinct == 10
    assert "no hits" in trace.notes[0]


def test_our_own_format_has_hints_and_tenants(tmp_path):
    row = {"timestamp_s": 1, "tokens": [*range(130)], "tenant": "a", "kind": "agent"}
    row |= {"continues": 0.5, "gap_s": 30, "output_length": 7}
    trace = read_trace(written(tmp_path / "t.jsonl", row, row | {"tenant": "b"}))
    first, second = trace.requests
    assert (first.continues, first.gap_s, first.kind) == (0.5, 30.0, "agent")
    assert first.num_output_tokens == 7
    assert first.tenant != second.tenant
    assert not {*first.blocks} & {*second.blocks}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("nonsense", "t.jsonl:2"),
        ("{broken", "t.jsonl:2.*JSON"),
        ({"timestamp": -1}, "t.jsonl:2: (input_length|timestamp)"),
        (MOONCAKE[0] | {"timestamp": None}, "t.jsonl:2: timestamp: is missing"),
        (MOONCAKE[0] | {"timestamp": "now"}, "t.jsonl:2: timestamp: 'now' is not a time"),
        (MOONCAKE[0] | {"timestamp": 1e300}, "t.jsonl:2: timestamp"),
        (MOONCAKE[0] | {"input_length": -1}, "t.jsonl:2: input_length"),
        (MOONCAKE[0] | {"input_length": 2**40}, "t.jsonl:2: input_length"),
        (MOONCAKE[0] | {"input_length": True}, "t.jsonl:2: input_length"),
        (MOONCAKE[0] | {"hash_ids": [0]}, "t.jsonl:2: hash_ids: 1 ids for 1100 tokens"),
        (MOONCAKE[0] | {"hash_ids": [0, None, 1]}, "t.jsonl:2: hash_ids"),
        (MOONCAKE[0] | {"hash_ids": "012"}, "t.jsonl:2: hash_ids"),
        (MOONCAKE[0] | {"output_length": "5"}, "t.jsonl:2: output_length"),
        ('{"a":' + "[" * 100_000, "t.jsonl:2.*JSON"),
        (
            {"timestamp": 0, "input_length": 512 * 20_000, "hash_ids": list(range(20_000))},
            "t.jsonl:2: has 20,000 blocks.*--block-tokens",
        ),
    ],
)
def test_a_line_that_cannot_be_used_is_named_with_its_field(tmp_path, row, message):
    path = written(tmp_path / "t.jsonl", MOONCAKE[1], row)
    with pytest.raises(StartError, match=message):
        read_trace(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", [1, -1]),
        ("tokens", [1, 2**32]),
        ("tokens", "text"),
        ("continues", 1.5),
        ("continues", "yes"),
        ("gap_s", -1),
        ("tenant", 5),
        ("timestamp_s", True),
    ],
)
def test_a_value_of_our_own_format_that_is_none_is_refused(tmp_path, field, value):
    row = {"timestamp_s": 1, "tokens": [1, 2, 3]} | {field: value}
    with pytest.raises(StartError, match=f"t.jsonl:1: {field}"):
        read_trace(written(tmp_path / "t.jsonl", row))


def test_files_that_are_no_traces_are_refused(tmp_path):
    with pytest.raises(StartError, match="cannot be read"):
        read_trace(tmp_path / "absent.jsonl")
    with pytest.raises(StartError, match="has no requests"):
        read_trace(written(tmp_path / "empty.jsonl"))
    with pytest.raises(StartError, match=r"supported formats.*Mooncake"):
        read_trace(written(tmp_path / "other.jsonl", {"a": 1}))
    (tmp_path / "rotten.xz").write_bytes(b"no xz at all")
    with pytest.raises(StartError, match="cannot be read"):
        read_trace(tmp_path / "rotten.xz")
    cut = lzma.compress(json.dumps(MOONCAKE[0]).encode() * 100)[:-20]
    (tmp_path / "cut.xz").write_bytes(cut)
    with pytest.raises(StartError, match=r"cannot be read|is not valid JSON"):
        read_trace(tmp_path / "cut.xz")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StartError, match="cannot be read"):
        read_trace(tmp_path / "binary.jsonl")


def test_blocks_that_are_no_groups_of_hashes_are_refused(tmp_path):
    with pytest.raises(StartError, match=r"--block-tokens.*multiple of the 512"):
        read_trace(written(tmp_path / "t.jsonl", *MOONCAKE), ReadOptions(block_tokens=700))


def test_the_future_of_each_block_is_its_next_use(tmp_path):
    trace = plain(tmp_path, [[1, 2], [3], [1, 2, 4], [1]])
    assert [use.tolist() for use in next_uses(trace)] == [
        [2, 2],
        [NEVER],
        [3, NEVER, NEVER],
        [NEVER],
    ]


def test_the_bound_is_never_beaten_and_grows_with_size(tmp_path):
    seed = 7
    draw = np.random.default_rng(seed)
    chains = []
    for _ in range(200):
        root, length = int(draw.integers(12)), int(draw.integers(1, 6))
        chains.append([root * 100 + place for place in range(length)])
    trace = plain(tmp_path, chains)
    totals = [sum(optimal_hits(trace, size)) for size in (1, 2, 4, 8, 16, 32, 64)]
    assert totals == sorted(totals), f"seed {seed}"
    # With room for everything only the first use of a block misses.
    assert totals[-1] == sum(map(len, chains)) - trace.num_distinct
    assert totals[0] > 0


def test_the_bound_keeps_what_comes_back_first(tmp_path):
    # Room for one block: block 1 comes back sooner than block 2, which is not taken in.
    assert optimal_hits(plain(tmp_path, [[1], [2], [1], [3], [2]]), 1) == [0, 0, 1, 0, 0]
    assert optimal_hits(plain(tmp_path, [[1], [2], [1], [3], [2]]), 2) == [0, 0, 1, 0, 1]


def test_hints_are_right_as_often_as_asked_and_repeat(tmp_path):
    trace = plain(tmp_path, [[n % 40] for n in range(400)])
    truth = continuations(trace)
    assert [r.continues for r in with_hints(trace, 1.0).requests] == [float(t) for t in truth]
    assert [r.continues for r in with_hints(trace, 0.0).requests] == [float(not t) for t in truth]
    mostly = with_hints(trace, 0.9, seed=3)
    right = sum(r.continues == float(t) for r, t in zip(mostly.requests, truth, strict=True))
    assert 0.85 < right / len(truth) < 0.95, "seed 3"
    again = with_hints(trace, 0.9, seed=3)
    assert [r.continues for r in mostly.requests] == [r.continues for r in again.requests]


def test_what_is_not_asked_for_soon_does_not_go_on(tmp_path):
    assert continuations(plain(tmp_path, [[1], [1]], step_s=601)) == [False, False]
    assert continuations(plain(tmp_path, [[1], [1]], step_s=599)) == [True, False]


def test_noise_never_comes_back_and_a_cycle_does(tmp_path):
    trace = plain(tmp_path, [[1], [2], [1], [2], [1], [2]])
    noisy = with_noise(trace)
    assert len(noisy.requests) == 12
    assert sum(optimal_hits(noisy, 1000)) == sum(optimal_hits(trace, 1000))
    cycle = with_cycle(trace, num_documents=2, num_blocks=3)
    assert len(cycle.requests) == 9
    assert sum(optimal_hits(cycle, 1000)) == sum(optimal_hits(trace, 1000)) + 3
    assert len(cycle.keys) == cycle.num_distinct == 8


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2023-11-16 18:17:03.97," + "9" * 5000 + ",1", "t.csv:2: ContextTokens"),
        ("2023-11-16 18:17:03.97," + "9" * 200_000 + ",1", "t.csv:2: is not valid CSV"),
        ("0001-01-01 00:00:00,64,1", "t.csv:2: TIMESTAMP"),
        ("9999-01-01 00:00:00,64,1", "t.csv:2: TIMESTAMP"),
    ],
)
def test_a_row_of_azure_that_cannot_be_used_is_named(tmp_path, row, message):
    with pytest.raises(StartError, match=message):
        read_trace(written(tmp_path / "t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", row))


def test_a_byte_order_mark_and_half_a_character_harm_nobody(tmp_path):
    row = '{"timestamp_s": 1, "tokens": [1], "tenant": "\\ud800", "kind": "a\\udfff"}'
    trace = read_trace(written(tmp_path / "t.jsonl", "\ufeff" + row))
    assert trace.requests[0].kind == "a?"
