"""What holds is shown as a file that says the same, and never with a secret."""

import json
from pathlib import Path

import pytest

from kvtier.config import load_config
from kvtier.config.toml_text import changes, document, render_toml, shown

SECRET = "hunter2"


def test_each_value_has_its_source(tmp_path: Path) -> None:
    path = tmp_path / "kvtier.toml"
    path.write_text("[ssd]\ncapacity = '8GiB'\n")
    environment = {"KVTIER_COST_RESTORE": "never"}
    found = document(load_config(path, {"http.listen": ""}, environment))
    assert found["ssd.capacity"] == {"value": "8GiB", "source": f"{path}:2", "reload": "restart"}
    assert found["cost.restore"] == {
        "value": "never",
        "source": "KVTIER_COST_RESTORE",
        "reload": "live",
    }
    assert found["http.listen"] == {"value": "", "source": "command line", "reload": "restart"}
    assert found["cost.split"]["source"] == "default"
    assert json.loads(json.dumps(found)) == found


def test_what_is_shown_is_a_file_that_says_the_same(tmp_path: Path) -> None:
    given = {
        "daemon.socket": str(tmp_path / 'a "b" \\ é \x7f.sock'),
        "daemon.allowed_uids": "[0, 65532]",
        "cpu.capacity": "3000000001",
        "ssd.gate": "0.5",
        "policy.max_offload_tokens": "4096",
        "engine.listen": "[::1]:9000",
        "http.listen": "",
    }
    config = load_config(None, given, {})
    path = tmp_path / "shown.toml"
    path.write_text(render_toml(document(config)))
    assert not list(changes(config, load_config(path, {}, {})))
    # As an engine is given what its daemon goes by.
    options = {key: str(each["value"]) for key, each in document(config).items()}
    assert not list(changes(config, load_config(None, options, {})))


@pytest.mark.parametrize(
    ("url", "is_shown"),
    [
        ("redis://cache:6379/0", "redis://cache:6379/0"),
        (f"rediss://kvtier:{SECRET}@cache:6380", "rediss://***@cache:6380"),
        (f"redis://:{SECRET}/@x@[::1]:1/2", "redis://***@[::1]:1/2"),
        (f"redis+sentinel://u:{SECRET}@a:1,b:2/main/0", "redis+sentinel://***@a:1,b:2/main/0"),
        (f"unix://u:{SECRET}@/run/redis.sock?db=1", "unix://***@/run/redis.sock?db=1"),
        (f"redis://:{SECRET}", "redis://***"),  # its owner forgot @host
        (f"redis://cache?password={SECRET}", "redis://***"),
        (f"redis://{SECRET}@", "redis://***@***"),
        ("redis://" + "a-" * 50_000 + "!", "redis://***"),
    ],
)
def test_no_secret_is_shown(url: str, is_shown: str) -> None:
    before, after = load_config(None, {}, {}), load_config(None, {"remote.url": url}, {})
    assert shown("remote.url", after) == f'"{is_shown}"'
    assert document(after)["remote.url"]["value"] == is_shown
    text = render_toml(document(after))
    assert f'# url = "{is_shown}"' in text, "what stands for it is no value of the file"
    assert SECRET not in text
    assert list(changes(before, after)) == [("remote.url", False)]


def test_what_differs_is_told_with_whether_it_is_live() -> None:
    before = load_config(None, {"ssd.gate": "0.5", "cpu.slab": "1MiB"}, {})
    after = load_config(None, {"cpu.slab": "1048576", "ssd.io_threads": "2"}, {})
    assert dict(changes(before, after)) == {"ssd.gate": True, "ssd.io_threads": False}
