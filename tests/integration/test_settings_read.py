"""A daemon and its engine read every setting, and a reload applies every live one."""

import contextlib
import json
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo

from kvtier.config import Config, load_config
from kvtier.config.model import all_settings, section_models, with_secrets
from kvtier.config.section import extra_of
from kvtier.config.toml_text import as_toml, toml_of
from kvtier.testing.child import Child, await_true, free_port, kvtier_command, work_directory
from kvtier.testing.running_node import url_of
from tests.integration.certificates import Authority, write_secret

pytestmark = pytest.mark.slow

RECORDER = Path(__file__).with_name("recorder")

OTHER_VALUES: Mapping[str, object] = {
    "daemon.log_level": "debug",
    "policy.max_offload_tokens": 4096,
    "cost.restore": "always",
    "cost.probe": "off",
}

READ_EACH_MINUTE = "cost.probe"
"""The daemon reads it too rarely for a test to wait for."""


def other_value(key: str, value: object) -> object:
    """Return another valid value of a setting."""
    if key in OTHER_VALUES:
        return OTHER_VALUES[key]
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return value / 2
    assert isinstance(value, int), f"OTHER_VALUES needs a value of {key}"
    return value + 1


def value_of(config: Config, section: str, name: str) -> object:
    return getattr(config.section(section), name)


def is_live(field: FieldInfo) -> bool:
    return bool(extra_of(field).get("live"))


def write_config(path: Path, values: Mapping[str, object]) -> None:
    """Write ``section.key`` values in TOML, or values that are TOML already."""
    sections: dict[str, list[str]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, []).append(f"{name} = {toml_of(value)}")
    path.write_text("\n".join("\n".join([f"[{s}]", *lines]) for s, lines in sections.items()))


def settings(directory: Path, model: Path) -> dict[str, object]:
    """Return a configuration that uses everything: all tiers, keys, certificates and an engine."""
    authority = Authority(directory)
    pair = authority.pair("daemon")
    return {
        "daemon.socket": str(directory / "k.sock"),
        "cpu.capacity": "16MiB",
        "cpu.slab": "1MiB",
        "ssd.directory": str(directory / "ssd"),
        "ssd.capacity": "64MiB",
        "ssd.segment": "4MiB",
        "ssd.free_space_floor": "1MiB",
        "ssd.seal": "encrypt",
        "remote.url_file": str(write_secret(directory / "url", "rediss://127.0.0.1:1")),
        "remote.tls_ca": str(authority.path),
        "remote.seal": "sign",
        "remote.write": "demote",
        "seal.key_file": str(write_secret(directory / "keys", f"one {'ab' * 32}\n")),
        "rpc.listen": f"127.0.0.1:{free_port()}",
        "rpc.tls_cert": str(pair.certificate),
        "rpc.tls_key": str(pair.key),
        "rpc.token_file": str(write_secret(directory / "token", "a-token-of-a-test")),
        "http.listen": f"127.0.0.1:{free_port()}",
        "engine.model": str(model),
        "engine.pool": "4MiB",
        "engine.listen": "127.0.0.1:0",
        "engine.api_keys_file": str(write_secret(directory / "api-keys", "an-api-key-of-a-test")),
    }


def unread(config: Config, reads: Path, *, is_live_only: bool = False) -> list[str]:
    """Return the settings whose value in ``config`` no process has read, after some seconds."""

    def missing() -> list[str]:
        seen = {tuple(json.loads(line)) for line in reads.read_text().splitlines()}
        return [
            key
            for key, section, name, field in all_settings()
            if is_live(field) or not is_live_only
            if (
                section_models()[section].__name__,
                key.partition(".")[2],
                str(value_of(config, section, name)),
            )
            not in seen
        ]

    with contextlib.suppress(AssertionError):
        await_true(lambda: not missing(), "all are read", 10)
    return missing()


def test_every_setting_is_read_and_every_live_one_again(tiny_folder: Path) -> None:
    with work_directory() as directory:
        path, reads = directory / "kvtier.toml", directory / "reads"
        values = settings(directory, tiny_folder)
        write_config(path, values)
        before = with_secrets(load_config(path, {}, {}))
        environment = {"PYTHONPATH": str(RECORDER), "KVTIER_TEST_READS": str(reads)}
        command = kvtier_command("serve", "--config", str(path))
        with Child(command, directory / "log", environment) as daemon:
            url_of(daemon)
            assert unread(before, reads) == []

            for key, section, name, field in all_settings():
                if is_live(field):
                    other = other_value(key, value_of(before, section, name))
                    values[key] = json.loads(as_toml(name, other))
            write_config(path, values)
            after = with_secrets(load_config(path, {}, {}))
            daemon.send(signal.SIGHUP)
            assert unread(after, reads, is_live_only=True) in ([], [READ_EACH_MINUTE])
