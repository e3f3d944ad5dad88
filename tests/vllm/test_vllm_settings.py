"""What a user says of the connector is read whole, or refused by name."""

from pathlib import Path

import pytest

from kvtier.client import ClientDeadlines
from kvtier.connectors.vllm_common.settings import Role, read_settings
from kvtier.errors import ConfigError


def test_all_that_can_be_said() -> None:
    extra: dict[str, object] = {
        "socket": "/run/kvtier/kvtier.sock",
        "only": "load",
        "lookup_timeout_ms": 100,
        "load_timeout_ms": 2000,
        "store_timeout_ms": 3000,
    }
    settings = read_settings(extra, {})
    assert settings.socket == Path("/run/kvtier/kvtier.sock")
    assert settings.deadlines == ClientDeadlines(0.1, 2.0, 3.0, 1.0)
    assert settings.role is Role.LOAD


@pytest.mark.parametrize(
    ("environment", "socket"),
    [
        ({"KVTIER_SOCKET": "/a/b", "KVTIER_DAEMON_SOCKET": "/c/d"}, "/a/b"),
        ({"KVTIER_DAEMON_SOCKET": "/c/d", "XDG_RUNTIME_DIR": "/run/user/1"}, "/c/d"),
        ({"KVTIER_SOCKET": "", "XDG_RUNTIME_DIR": "/run/user/1"}, "/run/user/1/kvtier/kvtier.sock"),
    ],
)
def test_a_socket_that_is_not_said_is_the_daemons(environment: dict[str, str], socket: str) -> None:
    assert read_settings({}, environment).socket == Path(socket)


@pytest.mark.parametrize(
    ("said", "loads", "stores"),
    [({"only": "store"}, False, True), ({"only": "load"}, True, False), ({}, True, True)],
)
def test_roles(said: dict[str, object], loads: bool, stores: bool) -> None:
    known = read_settings({"socket": "/s"} | said, {}).role
    assert (known.loads, known.stores) == (loads, stores)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"sockt": "/s"}, r"kv_connector_extra_config.sockt: .* did you mean socket\?"),
        ({"load_timeout": 5}, r"load_timeout: .* did you mean load_timeout_ms\?"),
        ({"zzz": 1}, "zzz: no such key; valid keys are socket, only, lookup_timeout_ms"),
        ({"socket": ""}, "socket: '' is not a socket path"),
        ({"socket": None}, "socket: None is not a socket path"),
        ({"socket": "/"}, "socket: '/' is not a socket path"),
        ({"socket": 7}, "socket: 7 is not a socket path"),
        ({"socket": "/" + "x" * 101}, "socket: /x+ has 102 bytes; use at most 101"),
        ({"only": "kv_producer"}, "only: 'kv_producer' is not known; use store or load, or"),
        ({"only": ["store"]}, r"only: \['store'\] is not known"),
        ({"only": ""}, "only: '' is not known"),
        ({"lookup_timeout_ms": 0}, "lookup_timeout_ms: 0 is not a number of milliseconds"),
        ({"lookup_timeout_ms": 10_001}, "integer from 1 to 10000"),
        ({"load_timeout_ms": "5s"}, "load_timeout_ms: '5s' is not a number"),
        ({"load_timeout_ms": True}, "load_timeout_ms: True is not a number"),
        ({"store_timeout_ms": 1.5}, "store_timeout_ms: 1.5 is not a number"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_by_name(extra: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_settings(extra, {})


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("KVTIER_SOCKET", r"\$KVTIER_SOCKET: /x+ has 102 bytes; use at most 101"),
        ("KVTIER_DAEMON_SOCKET", r"\$KVTIER_DAEMON_SOCKET: /x+ has 102 bytes"),
        ("XDG_RUNTIME_DIR", "kv_connector_extra_config.socket: /x+/kvtier/kvtier.sock has 121"),
    ],
)
def test_a_socket_of_the_environment_is_looked_at_as_well(variable: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_settings({}, {variable: "/" + "x" * 101})
