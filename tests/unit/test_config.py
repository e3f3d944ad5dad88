"""The configuration: what is read, from where, and how each mistake is refused."""

from pathlib import Path

import pytest

from kvtier.config import Config, ListenAddress, load_config
from kvtier.config.units import format_duration, format_size, parse_duration, parse_size
from kvtier.errors import ConfigError


def refused(path=None, overrides=None, environment=None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides or {}, environment or {})
    assert "\n" not in str(caught.value), "a refusal is one line"
    assert caught.value.remedy, "a refusal says what to do"
    return caught.value


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "kvtier.toml"
    path.write_text(text)
    return path


def test_defaults_need_no_file():
    config = load_config(None, {}, {})
    assert config.cpu.capacity_bytes == 2 << 30
    assert config.daemon.lease_ns == 30 * 10**9
    assert config.engine.listen == ListenAddress("127.0.0.1", 8000)
    assert config.engine.model is None
    assert config.tiers["remote"].url == ""
    assert config.source_of("cpu.capacity") == "default"


def test_loads_nothing_it_was_not_given(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "[cpu]\ncapacity = '1GiB'\n")
    assert load_config(None, {}, {}) == Config()


def test_a_file_sets_every_kind_of_value(tmp_path):
    path = written(
        tmp_path,
        """
        [daemon]
        socket = "/run/kvtier/k.sock"
        lease = "1min"
        [cpu]
        capacity = 1073741824
        [ssd]
        enabled = false
        io_threads = 8
        direct_io = "off"
        [http]
        listen = ""
        [engine]
        listen = "[::1]:9000"
        pool = "1.5GiB"
        """,
    )
    config = load_config(path, {}, {})
    assert config.daemon.socket == Path("/run/kvtier/k.sock")
    assert config.daemon.lease_ns == 60 * 10**9
    assert config.cpu.capacity_bytes == 1 << 30
    assert (
        config.tiers["ssd"].enabled,
        config.tiers["ssd"].io_threads,
        config.tiers["ssd"].direct_io,
    ) == (False, 8, "off")
    assert config.http.listen is None
    assert config.engine.listen == ListenAddress("::1", 9000)
    assert str(config.engine.listen) == "[::1]:9000"
    assert config.engine.pool_bytes == 3 << 29
    assert config.source_of("ssd.io_threads") == f"{path}:9"


def test_later_sources_win_key_by_key(tmp_path):
    path = written(tmp_path, "[ssd]\nio_threads = 1\ncapacity = '1GiB'\nsegment = '8MiB'\n")
    environment = {"KVTIER_SSD_IO_THREADS": "2", "KVTIER_SSD_CAPACITY": "2GiB"}
    config = load_config(path, {"ssd.io_threads": "3"}, environment)
    assert config.tiers["ssd"].io_threads == 3
    assert config.tiers["ssd"].capacity_bytes == 2 << 30
    assert config.tiers["ssd"].segment_bytes == 8 << 20
    assert config.source_of("ssd.io_threads") == "command line"
    assert config.source_of("ssd.capacity") == "KVTIER_SSD_CAPACITY"
    assert config.source_of("ssd.segment") == f"{path}:4"


def test_text_sources_spell_numbers_and_truth_as_toml_does():
    environment = {"KVTIER_SSD_ENABLED": "false", "KVTIER_ENGINE_CONTEXT_LIMIT": "4096"}
    config = load_config(None, {}, environment)
    assert config.tiers["ssd"].enabled is False
    assert config.engine.context_limit == 4096


def test_foreign_variables_are_not_ours():
    environment = {
        "KVTIER_PORT": "tcp://10.0.0.1:9464",
        "KVTIER_ENGINE_SERVICE_HOST": "10.0.0.2",
        "KVTIER_ENGINE_PORT_8000_TCP_ADDR": "10.0.0.2",
        "KVTIER_CONFIG": "/etc/kvtier.toml",
        "HOME": "/",
    }
    assert load_config(None, {}, environment) == Config()


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("cpu.capacity", "4Gb", "unit 'Gb'"),
        ("cpu.capacity", "4G", "unit 'G'"),
        ("cpu.capacity", "-1", "below the minimum of 1MiB"),
        ("cpu.capacity", "lots", "not a size"),
        ("cpu.capacity", "0.3B", "whole number"),
        ("cpu.slab", "100kB", "not a multiple of 4KiB"),
        ("daemon.lease", "30", "no unit"),
        ("daemon.lease", "30 parsecs", "unit 'parsecs'"),
        ("daemon.lease", "2h", "above the maximum of 1h"),
        ("ssd.io_threads", "four", "expected an integer"),
        ("ssd.io_threads", "0", "below the minimum of 1"),
        ("ssd.enabled", "yes", "expected true or false"),
        ("ssd.direct_io", "maybe", "'auto', 'on' or 'off'"),
        ("ssd.directory", "", "not a path"),
        ("http.listen", "localhost", "not a HOST:PORT address"),
        ("http.listen", "localhost:70000", "not a HOST:PORT address"),
        ("engine.listen", "", "not a HOST:PORT address"),
        ("engine.device", "tpu", "not a valid value"),
        ("remote.key_prefix", "", "must not be empty"),
    ],
)
def test_a_bad_value_is_refused_by_its_key(key, value, problem):
    error = refused(overrides={key: value})
    assert error.field == key
    assert problem in error.problem
    assert "command line" in error.problem
    assert key.partition(".")[2] in error.remedy


def test_a_socket_needs_a_name():
    error = refused(overrides={"daemon.socket": "/"})
    assert error.field == "daemon.socket"
    assert "/ has no file name" in error.problem


@pytest.mark.parametrize(
    ("text", "field", "problem"),
    [
        ("[ssd]\nio_threads = '4'\n", "ssd.io_threads", "expected an integer"),
        ("[ssd]\nio_threads = true\n", "ssd.io_threads", "expected an integer"),
        ("[ssd]\nenabled = 1\n", "ssd.enabled", "expected true or false, got 1"),
        ("[ssd]\ndirectory = 1\n", "ssd.directory", "expected a path, got 1"),
        ("[cpu]\ncapacity = true\n", "cpu.capacity", "true is not a size"),
        ("[cpu]\ncapacity = ['1GiB']\n", "cpu.capacity", "not a size"),
        ("[daemon]\nlease = 30\n", "daemon.lease", "no unit"),
        ("cpu = 4\n", "cpu", "a section"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(tmp_path, text, field, problem):
    path = written(tmp_path, text)
    error = refused(path)
    assert error.field == field
    assert problem in error.problem
    assert str(path) in error.problem


@pytest.mark.parametrize(
    ("text", "field", "near"),
    [
        ("[cpu]\ncapacty = '1GiB'\n", "cpu.capacty", "capacity"),
        ("[cpu]\ncapacity_bytes = 1\n", "cpu.capacity_bytes", "capacity"),
        ("[sdd]\n", "sdd", "ssd"),
    ],
)
def test_an_unknown_key_names_the_nearest(tmp_path, text, field, near):
    error = refused(written(tmp_path, text))
    assert error.field == field
    assert error.remedy == f"did you mean {near}?"


def test_unknown_keys_are_refused_from_every_source():
    assert refused(environment={"KVTIER_CPU_CAPACTY": "1GiB"}).field == "cpu.capacty"
    assert refused(overrides={"cpu.capacty": "1GiB"}).field == "cpu.capacty"
    assert refused(overrides={"capacity": "1GiB"}).field == "capacity"
    assert "valid sections are" in refused(overrides={"zzz.q": "1"}).remedy


def test_keys_that_must_fit_each_other():
    assert refused(overrides={"cpu.capacity": "32MiB"}).field == "cpu.slab"
    assert refused(overrides={"ssd.capacity": "256MiB"}).field == "ssd.segment"
    assert refused(overrides={"engine.block_tokens": "24"}).field == "engine.block_tokens"


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    assert "No such file" in refused(tmp_path / "absent.toml").problem
    assert "directory" in refused(tmp_path).problem
    assert "line 2" in refused(written(tmp_path, "[cpu]\ncapacity = \n")).problem
    binary = tmp_path / "model.gguf"
    binary.write_bytes(b"\n\xff\xfe")
    assert "line 2" in refused(binary).problem
    binary.write_bytes(bytes(2 << 20))
    assert "1 MiB" in refused(binary).problem


def test_a_password_is_in_no_message_and_no_repr(tmp_path):
    secret = "hunter2"
    error = refused(written(tmp_path, f"[remote]\nurl = 'http://u:{secret}@h'\n"))
    assert error.field == "remote.url"
    assert secret not in str(error)
    config = load_config(None, {"remote.url": f"redis://u:{secret}@h"}, {})
    assert secret not in repr(config)
    assert secret in config.tiers["remote"].url


def test_nothing_changes_after_loading():
    config = load_config(None, {}, {})
    with pytest.raises(ValueError, match="frozen"):
        config.cpu.capacity_bytes = 1


def test_paths_are_absolute_and_know_home(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ada")
    config = load_config(None, {"ssd.directory": "blocks", "engine.model": "~/m.gguf"}, {})
    assert config.tiers["ssd"].directory == tmp_path / "blocks"
    assert config.engine.model == Path("/home/ada/m.gguf")


@pytest.mark.parametrize("size_bytes", [0, 1, 1023, 1024, 3 << 29, 64 << 30, 5 << 40, 10**9])
def test_sizes_are_written_exactly(size_bytes):
    assert parse_size(format_size(size_bytes)) == size_bytes


@pytest.mark.parametrize("duration_ns", [0, 1, 999, 10**6, 250 * 10**6, 90 * 10**9, 86400 * 10**9])
def test_durations_are_written_exactly(duration_ns):
    assert parse_duration(format_duration(duration_ns)) == duration_ns


def test_the_default_cache_directory_is_private_to_a_user(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/tmp/ada")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    config = load_config(None, {}, {})
    assert config.tiers["ssd"].directory == Path("/var/tmp/ada/kvtier")
    assert config.daemon.socket == Path("/run/user/7/kvtier/kvtier.sock")
