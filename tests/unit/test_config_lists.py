"""Settings that are lists: in the file, in a variable, on the command line, and in documents."""

from pathlib import Path

import pytest

from kvtier.config import load_config
from kvtier.config.reference import render_example, render_reference
from kvtier.config.toml_text import document
from kvtier.errors import ConfigError

KEY = "daemon.allowed_uids"


def from_file(path: Path, value: str) -> tuple[int, ...]:
    path.write_text(f"[daemon]\nallowed_uids = {value}\n")
    return load_config(path, {}, {}).daemon.allowed_uids


def test_a_list_is_spelled_as_its_place_has_it(tmp_path):
    assert from_file(tmp_path / "k.toml", "[1000, 65532]") == (1000, 65532)
    assert from_file(tmp_path / "k.toml", "[]") == ()
    for text, numbers in {
        "1000,65532": (1000, 65532),
        " 1000 , 65532 ": (1000, 65532),
        "[1000, 65532]": (1000, 65532),
        "0": (0,),
        "": (),
    }.items():
        assert load_config(None, {KEY: text}, {}).daemon.allowed_uids == numbers
        environment = {"KVTIER_DAEMON_ALLOWED_UIDS": text}
        assert load_config(None, {}, environment).daemon.allowed_uids == numbers


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("1000;2", "expected a list of integers"),
        ("x", "expected a list of integers"),
        ("1,,2", "expected a list of integers"),
        ("1.5", "expected a list of integers"),
        ("-1", "is below the minimum of 0"),
        ("4294967295", "is above the maximum of 4294967294"),
    ],
)
def test_what_is_no_list_of_users_is_refused(value, problem):
    with pytest.raises(ConfigError, match=problem) as refused:
        load_config(None, {KEY: value}, {})
    assert refused.value.field == KEY
    assert "allowed_uids = [1000, 65532]" in refused.value.remedy


@pytest.mark.parametrize("value", ["5", '"5"', "[true]", '["1"]', "[1.5]", "[[1]]"])
def test_a_file_is_taken_at_its_word(tmp_path, value):
    with pytest.raises(ConfigError, match=r"daemon\.allowed_uids"):
        from_file(tmp_path / "k.toml", value)


def test_the_documents_show_it_as_it_is_written():
    assert "# allowed_uids = [1000, 65532]\n" in render_example()
    assert "| `allowed_uids` | list of integers | `none` |" in render_reference()


def test_a_list_of_texts_is_spelled_the_same_way(tmp_path):
    origins = ("https://chat.example", "http://[::1]:3000", "app://desk")
    file = tmp_path / "k.toml"
    file.write_text(f"[engine]\ncors_origins = {list(origins)}\n")
    config = load_config(file, {}, {})
    assert config.engine.cors_origins == origins
    value = document(config)["engine.cors_origins"][
        "value"
    ]  # the daemon passes it to its engine as an option
    for text in (str(value), ",".join(origins), " , ".join(origins)):
        assert load_config(None, {"engine.cors_origins": text}, {}).engine.cors_origins == origins
    for text in ("", "[]"):
        assert load_config(None, {"engine.cors_origins": text}, {}).engine.cors_origins == ()
    assert load_config(None, {"http.allowed_hosts": "*"}, {}).http.allowed_hosts == ("*",)
    assert '# cors_origins = ["https://chat.example"]\n' in render_example()
    assert "| `cors_origins` | list of strings | `none` |" in render_reference()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("engine.cors_origins", "null"),
        ("engine.cors_origins", "chat.example"),
        ("engine.cors_origins", "https://chat.example/"),
        ("engine.cors_origins", "https://Chat.example"),
        ("engine.cors_origins", "https://a.example,,https://b.example"),
        ("engine.allowed_hosts", "chat.example:8000"),
        ("http.allowed_hosts", "http://chat.example"),
    ],
)
def test_what_no_browser_sends_is_refused(key, value):
    with pytest.raises(ConfigError, match="is not a valid value") as refused:
        load_config(None, {key: value}, {})
    assert f"{key.partition('.')[2]} = [" in refused.value.remedy
