"""A URL in a file of its own: it counts as if it stood in the configuration, and is never told."""

import os
from pathlib import Path

import pytest

from kvtier.config import Config, load_config, read_config
from kvtier.config.model import with_secrets
from kvtier.config.toml_text import changes, document, render_toml
from kvtier.core.residency import TierName
from kvtier.daemon.tiers.opening import configured, devices_of, is_same_place
from kvtier.errors import ConfigError

SECRET = "hunter2"
URL = f"rediss://kvtier:{SECRET}@cache:6379/0"


def from_file(path: Path, content: str = f"{URL}\n", mode: int = 0o600) -> Config:
    path.write_text(content)
    path.chmod(mode)
    return load_config(None, {"remote.url_file": str(path)}, {})


def by_url(url: str) -> Config:
    return load_config(None, {"remote.url": url}, {})


@pytest.mark.parametrize("content", [URL, f"{URL}\n", f"# of the cache team\n\n  {URL}  \n"])
def test_it_counts_as_if_it_stood_there(tmp_path: Path, content: str) -> None:
    path = tmp_path / "url"
    config = with_secrets(from_file(path, content))
    assert config.tiers["remote"].url == URL
    assert TierName.REMOTE in configured(config)
    found = document(config)
    assert found["remote.url"]["value"] == "rediss://***@cache:6379/0"
    assert found["remote.url"]["source"] == str(path)
    assert SECRET not in render_toml(found) + repr(config)
    (tmp_path / "shown.toml").write_text(render_toml(found))
    shown = with_secrets(load_config(tmp_path / "shown.toml", {}, {}))
    assert not list(changes(config, shown)), "what is shown is a file that says the same"


def test_without_such_a_file_nothing_is_read() -> None:
    config = by_url(URL)
    assert with_secrets(config) is config


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        ("", 0o600, "must have exactly one line, not 0"),
        (f"{URL}\n{URL}\n", 0o600, "must have exactly one line, not 2"),
        (f"http://{SECRET}@cache", 0o600, "does not contain the URL of a Redis server"),
        (SECRET, 0o600, "does not contain the URL of a Redis server"),
        (URL, 0o644, "other users can access"),
        ("x" * (2 << 20), 0o600, "larger than 1 MiB"),
    ],
)
def test_a_file_that_will_not_do(tmp_path: Path, content: str, mode: int, words: str) -> None:
    config = from_file(tmp_path / "url", content, mode)
    with pytest.raises(ConfigError) as raised:
        with_secrets(config)
    assert raised.value.field == "remote.url_file"
    assert words in raised.value.problem
    assert str(tmp_path) in raised.value.problem
    assert SECRET not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_or_waits_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, words in (("absent", "cannot read"), ("pipe", "is not a regular file")):
        config = load_config(None, {"remote.url_file": str(tmp_path / name)}, {})
        with pytest.raises(ConfigError, match=words):
            with_secrets(config)


def test_there_is_one_url() -> None:
    faults = read_config(None, {"remote.url_file": "/x"}, {"KVTIER_REMOTE_URL": URL})
    assert not isinstance(faults, Config)
    (fault,) = faults
    assert fault.field == "remote.url_file"
    assert "remote.url" in fault.problem
    assert SECRET not in str(fault)


@pytest.mark.parametrize(
    ("url", "is_alone"),
    [
        (URL, True),
        (f"rediss://other:{SECRET}@cache", True),
        ("rediss://cache", True),
        (f"rediss://kvtier:{SECRET}@cache:6380", False),
        (f"rediss://kvtier:{SECRET}@cache/1", False),
        (f"redis://kvtier:{SECRET}@cache", False),
        ("", False),
        ("rediss://u@cache", False),  # a user without a password
    ],
)
def test_another_login_is_no_other_server(url: str, is_alone: bool) -> None:
    assert is_same_place(TierName.REMOTE, by_url(URL), by_url(url)) is is_alone


def test_another_login_is_no_other_medium() -> None:
    urls = [URL.replace(SECRET, word) for word in ("a", "b")]
    names = {devices_of(by_url(url), [TierName.REMOTE])[TierName.REMOTE] for url in urls}
    assert len(names) == 1, "what was measured of it counts on"
