"""All that is wrong with a configuration is said at once, with where each value came from."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from kvtier.config import Config, read_config
from kvtier.errors import ConfigError


def faults(
    text: str = "",
    overrides: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    folder: Path | None = None,
) -> Sequence[ConfigError]:
    path = None
    if folder is not None:
        path = folder / "kvtier.toml"
        path.write_text(text)
    read = read_config(path, overrides or {}, environment or {})
    return () if isinstance(read, Config) else read


def said(found: Sequence[ConfigError]) -> list[tuple[str, str]]:
    """Return each fault's key and source."""
    return [(fault.field, fault.problem.rpartition("(")[2].rstrip(")")) for fault in found]


def test_all_faults_of_all_sources_come_at_once(tmp_path: Path) -> None:
    text = "[sdd]\n[cpu]\ncapacty = 1\nslab = '64Gb'\n\n[ssd]\nio_threads = 0\ngate = 'x'\n"
    found = faults(
        text,
        {"cost.split": "maybe", "rpc.nothing": "1"},
        {"KVTIER_DAEMON_LEASE": "5"},
        folder=tmp_path,
    )
    path = tmp_path / "kvtier.toml"
    assert said(found) == [
        ("sdd", str(path)),
        ("cpu.capacty", f"{path}:3"),
        ("rpc.nothing", "command line"),
        ("daemon.lease", "KVTIER_DAEMON_LEASE"),
        ("cpu.slab", f"{path}:4"),
        ("ssd.gate", f"{path}:8"),
        ("ssd.io_threads", f"{path}:7"),
        ("cost.split", "command line"),
    ]
    assert all(fault.remedy and "\n" not in str(fault) for fault in found)


def test_keys_that_do_not_fit_say_where_they_came_from(tmp_path: Path) -> None:
    text = "[rpc]\nlisten = '0.0.0.0:1'\n[cpu]\ncapacity = '1MiB'\n[ssd]\nsegment = '20GiB'\n"
    assert said(faults(text, folder=tmp_path)) == [
        ("cpu.slab", "default"),
        ("ssd.segment", f"{tmp_path}/kvtier.toml:6"),
        ("rpc.tls_cert", "default"),
        ("rpc.tls_key", "default"),
        ("rpc.token_file", "default"),
    ]


def test_two_sections_are_compared() -> None:
    found = faults(overrides={"ssd.seal": "encrypt", "remote.seal": "sign"})
    assert said(found) == [("seal.key_file", "default"), ("seal.key_file", "default")]


def test_a_bad_value_has_nothing_against_others() -> None:
    found = faults(overrides={"cpu.capacity": "1Zb", "cpu.slab": "8GiB"})
    assert said(found) == [("cpu.capacity", "command line")]


@pytest.mark.parametrize(
    "text",
    [
        "cpu = { slab = '1Gb' }\n",
        "cpu.slab = '1Gb'\n",
        "[engine]\nserved_model_name = '''\n[cpu]\nslab = \n'''\n[cpu]\nslab = '1Gb'\n",
    ],
)
def test_a_line_is_left_out_rather_than_wrong(tmp_path: Path, text: str) -> None:
    assert said(faults(text, folder=tmp_path)) == [("cpu.slab", str(tmp_path / "kvtier.toml"))]


def test_bytes_that_are_no_text_are_refused_by_their_key() -> None:
    given = b"/var/\xff".decode(errors="surrogateescape")
    found = faults(environment={"KVTIER_SSD_DIRECTORY": given})
    assert said(found) == [("ssd.directory", "KVTIER_SSD_DIRECTORY")]
    assert "UTF-8" in found[0].problem


def test_a_file_that_nests_without_end_is_refused(tmp_path: Path) -> None:
    found = faults(f"[cpu]\ncapacity = {'[' * 20_000}\n", folder=tmp_path)
    assert [fault.field for fault in found] == [str(tmp_path / "kvtier.toml")]


def test_a_path_with_a_zero_byte_is_refused() -> None:
    read = read_config(Path("/etc/\0"), {}, {})
    assert not isinstance(read, Config)
    assert "null" in read[0].problem


def test_a_variable_with_a_slip_in_its_section_is_not_overlooked() -> None:
    found = faults(environment={"KVTIER_SDD_CAPACITY": "1GiB", "KVTIER_ENGIN_POOL": "1GiB"})
    assert [fault.remedy for fault in found] == [
        "did you mean KVTIER_ENGINE_POOL?",
        "did you mean KVTIER_SSD_CAPACITY?",
    ]
    foreign = {
        "KVTIER_SSDS_SERVICE_HOST": "10.0.0.1",
        "KVTIER_REMOTE2_PORT_6379_TCP": "10.0.0.1",
        "KVTIER_VLLM": "0.30",
        "KVTIER_TRACES": "/traces",
    }
    assert not faults(environment=foreign)
