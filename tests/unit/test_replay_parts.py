"""The parts of a replay: its engines' speed, its machine, its disk, its charts, its sizes."""

import math
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from kvtier.core.identity import BlockHash, BlockHeader
from kvtier.errors import StartError
from kvtier.node.messages.actions import TransferBlock
from kvtier.sim.replay.chart import Axis, Series, bars, lines
from kvtier.sim.replay.context import EventQueue, Pipe
from kvtier.sim.replay.node_adapter import SsdModel
from kvtier.sim.replay.prefill import Dimensions, PrefillModel, fit_profile, read_dimensions
from kvtier.sim.replay.setup import Machine, load_machine
from kvtier.sim.replay.sizing import Point, Target, break_even_bytes_per_s, knee, sizes_for
from kvtier.sim.replay.traffic import Traffic
from kvtier.tiers.base import MissReason


def test_prefill_has_a_floor_and_grows_with_what_is_attended():
    model = PrefillModel()
    assert model.seconds(0, 1000) == 0.0
    assert model.seconds(1, 0) == pytest.approx(0.010, rel=1e-3)
    assert model.seconds(1000, 0) == pytest.approx(0.067 + model.attended_s * 500_000)
    whole = model.seconds(8192, 0)
    assert model.seconds(4096, 0) + model.seconds(4096, 4096) == pytest.approx(whole)
    assert model.sample(10, 20).seconds == model.seconds(10, 20)


def profile(path: Path, tokens: tuple[int, ...] = (1, 16, 1024, 4096)) -> Path:
    head = "time_stats.emb.median,time_stats.mlp.median,time_stats.mlp.max,n_head,n_kv_head,"
    head += "n_embd,n_expanded_embd,use_gated_mlp,num_tokens,num_tensor_parallel_workers"
    rows = [f"0.0,{max(0.25, n / 1000)},99,32,8,4096,14336,True,{n},1" for n in tokens]
    # Of two devices together: not what one does.
    rows += [f"0.0,{n / 9000},99,32,8,4096,14336,True,{n},2" for n in tokens]
    path.write_text("\n".join([head, *rows]) + "\n")
    return path


def test_a_profile_gives_floor_slope_and_attention(tmp_path):
    model = fit_profile(profile(tmp_path / "p.csv"), num_layers=40)
    assert model.floor_s == pytest.approx(0.010)
    assert model.token_s == pytest.approx(40e-6)
    # Attention of some 27,000 tokens takes as long as the layers' other operations.
    assert 25_000 < model.token_s / model.attended_s < 30_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rows"),
        ("num_tokens\n", "has no rows"),
        ("num_tokens,time_stats.mlp.median\nmany,1\n", "num_tokens: 'many' is not a valid number"),
        ("num_tokens,time_stats.mlp.median\n5,fast\n", "mlp.median: 'fast' is not a valid number"),
    ],
)
def test_a_profile_that_is_none_is_refused(tmp_path, text, message):
    path = tmp_path / "p.csv"
    path.write_text(text)
    with pytest.raises(StartError, match=message):
        fit_profile(path, 32)
    with pytest.raises(StartError, match="cannot be read"):
        fit_profile(tmp_path / "absent.csv", 32)


def test_a_profile_without_small_or_large_batches_is_refused(tmp_path):
    with pytest.raises(StartError, match="complete profile"):
        fit_profile(profile(tmp_path / "p.csv", tokens=(256, 512)), 32)


def test_a_machine_is_read_from_its_file(tmp_path):
    path = tmp_path / "machine.toml"
    path.write_text("token_bytes = 4096\n[ssd]\nread_bytes_per_s = 1e9\nlatency_s = 1\n")
    machine = load_machine(path)
    assert machine.token_bytes == 4096
    assert machine.ssd.read_bytes_per_s == 1e9
    assert machine.ssd.latency_s == 1.0
    assert machine.cpu == Machine().cpu
    assert machine.with_prefill(PrefillModel(token_s=1.0)).prefill_model.token_s == 1.0


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("wheels = 4", "wheels"),
        ("[ssd]\nread_bytes_per_s = 0", "ssd.read_bytes_per_s"),
        ("[ssd]\nread_bytes_per_s = true", "ssd.read_bytes_per_s"),
        ("[ssd]\nlatency_s = -1", "ssd.latency_s"),
        ("[prefill]\ntoken_s = nan", "prefill.token_s"),
        ("[engines]\ncount = 1000", "engines.count"),
        ("[engines", "machine.toml: cannot be read"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(tmp_path, text, field):
    path = tmp_path / "machine.toml"
    path.write_text(text)
    with pytest.raises(StartError, match=field):
        load_machine(path)


def test_an_agenda_keeps_time_and_order():
    agenda, done = EventQueue(), list[str]()
    agenda.at(20, lambda: done.append("late"))
    agenda.at(10, lambda: done.append("first"))
    agenda.at(10, lambda: done.append("second"))
    agenda.at(10, lambda: agenda.at(5, lambda: done.append("past")))
    while agenda.step():
        pass
    assert done == ["first", "second", "past", "late"]
    assert agenda.now_ns == 20


def test_a_pipe_carries_one_after_the_other():
    pipe = Pipe(latency_s=1e-6)
    assert pipe.arrival_ns(0, 1e-6) == 2000
    assert pipe.arrival_ns(0, 1e-6) == 3000
    assert pipe.arrival_ns(10_000, 1e-6) == 12_000


def block(number: int) -> TransferBlock:
    name = BlockHash(number.to_bytes(16, "little"))
    return TransferBlock(BlockHeader(bytes(16), bytes(16), name, name, 0, 4096), 0)


def test_a_shelf_lets_the_least_recently_used_go_and_never_what_is_written_now():
    shelf = SsdModel(3, None)
    assert shelf.write([block(1), block(2), block(3)])[1] == b""
    shelf.touch([block(1).header.block_hash])
    outcomes, evicted = shelf.write([block(4), block(5)])
    assert len(outcomes) == 2
    assert evicted == block(2).header.block_hash + block(3).header.block_hash
    assert shelf.read([block(1), block(2)]) == (bytes(16), MissReason.ABSENT)
    assert (shelf.num_written, shelf.num_read, len(shelf)) == (5, 1, 3)


def test_charts_are_well_formed_whatever_they_show():
    x = Axis("size <b>", lambda value: f"{value:g}", is_log=True)
    y = Axis("share & more", lambda value: f"{value:.0%}")
    for points in ([], [(1.0, 0.5)], [(1.0, 0.0), (2.0, 0.0)], [(1.0, -0.2), (1e6, math.inf)]):
        figure = lines(
            "a < b", x, y, [Series("<script>", points), Series("bound", points, "bound")]
        )
        assert ET.fromstring(figure).tag == "figure"
        assert "<script>" not in figure
    assert ET.fromstring(bars("bars", y, [])).tag == "figure"
    figure = bars("bars", y, [("rd & co", [("cpu", 0.2), ("ssd", 0.0)])])
    assert len([*ET.fromstring(figure).iter("rect")]) == 2


def curve(*ratios: float) -> list[Point]:
    return [Point(1000 * 2**n, ratio, ratio, 1.0) for n, ratio in enumerate(ratios)]


def test_a_curve_bends_where_a_doubling_ceases_to_pay():
    assert knee(curve(0.0, 0.2, 0.4, 0.42, 0.43)).num_blocks == 4000
    assert knee(curve(0.3, 0.3, 0.3)).num_blocks == 1000
    assert knee(curve(0.3)).num_blocks == 1000


def test_sizes_reach_a_target_or_say_that_they_do_not():
    points = curve(0.0, 0.2, 0.4, 0.42, 0.43)
    sizes = sizes_for(points, Target(hit_ratio=0.41), 4096)
    assert (sizes.cpu_blocks, sizes.is_reached) == (4000, True)
    assert sizes.cpu_blocks + sizes.ssd_blocks >= 8000
    assert not sizes_for(points, Target(saved_share=0.9), 4096).is_reached
    small = sizes_for(points, Target(hit_ratio=0.1), 4096)
    assert (small.cpu_blocks, small.ssd_blocks) == (2000, 0)
    memory = sizes_for(points, Target(memory_bytes=3000 * 4096), 4096)
    assert memory.cpu_blocks == 3000
    assert sizes_for(points, Target(), 4096).cpu_blocks == 4000


def test_break_even_is_bytes_of_a_token_times_tokens_a_second():
    assert break_even_bytes_per_s(Machine()) == pytest.approx(131_072 / 67e-6)


def test_a_model_is_read_from_its_configuration(tmp_path):
    fields = '"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,'
    fields += '"num_hidden_layers": 32, "intermediate_size": 14336, "torch_dtype": "bfloat16"'
    (tmp_path / "config.json").write_text("{" + fields + "}")
    dimensions = read_dimensions(tmp_path)
    assert dimensions.token_bytes == 131_072
    assert dimensions.layout(64).block_bytes == 64 * 131_072
    # It is the very model whose speed is known.
    assert dimensions.prefill(PrefillModel()).token_s == pytest.approx(67e-6)
    assert read_dimensions(tmp_path, "fp8").token_bytes == 65_536


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "is not a JSON object"),
        ("{", "is not valid JSON"),
        ("{}", "num_attention_heads: 0 is not a count"),
        ('{"num_attention_heads": "many"}', "num_attention_heads: 'many'"),
        ('{"kv_lora_rank": 512}', "latent attention"),
    ],
)
def test_a_model_that_tells_too_little_is_refused(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(StartError, match=message):
        read_dimensions(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(StartError, match=r"config\.json"):
        read_dimensions(tmp_path)
    with pytest.raises(StartError, match="does not exist"):
        read_dimensions(tmp_path / "absent")
    (tmp_path / "x.gguf").write_bytes(b"nothing")
    with pytest.raises(StartError, match="GGUF"):
        read_dimensions(tmp_path / "x.gguf")


def test_dimensions_that_are_given_keep_the_default_speed():
    given = Dimensions("as given", 2, 1, 64, "float32")
    assert given.token_bytes == 2 * 2 * 64 * 4
    assert given.prefill(PrefillModel()) == PrefillModel()


def test_traffic_repeats_and_shares_what_it_says():
    traffic = Traffic(sessions=4, prompt_tokens=300, turn_tokens=100, shared_tokens=128, hours=0.3)
    trace = traffic.trace()
    again = traffic.trace()
    assert [r.at_ns for r in trace.requests] == [r.at_ns for r in again.requests]
    assert {r.blocks[0] for r in trace.requests} == {trace.requests[0].blocks[0]}
    assert trace.num_tokens > trace.num_distinct * trace.block_tokens
    assert 0 < trace.seconds <= 0.3 * 3600
