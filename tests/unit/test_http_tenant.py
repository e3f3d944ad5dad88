"""Whose request it is: keys let in, salts drawn from them, and what is told to whom."""

import asyncio
import os
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from kvtier.api.http.app import create_app
from kvtier.api.http.tenant import TenantRules, api_keys, key_salt
from kvtier.engine.request import EngineRequest
from kvtier.errors import StartError
from kvtier.secret import Secret
from kvtier.testing.engine_service import ByteChatModel, FakeEngineService, ScriptedAnswer

ALICE, BOB = "alice-0123456789", "bob-0123456789abc"
BODY = {"model": "byte-model", "prompt": "hello", "max_tokens": 1}


class Server:
    """The application in this process; ``salts`` are those that reached the engine."""

    def __init__(self, tenants: TenantRules, host: str = "203.0.113.7") -> None:
        self.salts: list[str | None] = []
        self._tenants = tenants
        self._host = host

    def _answer(self, request: EngineRequest) -> ScriptedAnswer:
        self.salts.append(request.cache_salt)
        return ScriptedAnswer((65,))

    async def ask(
        self, path: str, key: str | None = None, scheme: str = "Bearer", **more: object
    ) -> httpx.Response:
        with FakeEngineService(self._answer) as engine:
            app = create_app(
                engine, ByteChatModel(), registry=CollectorRegistry(), tenants=self._tenants
            )
            transport = httpx.ASGITransport(app, client=(self._host, 4711))
            headers = {} if key is None else {"authorization": f"{scheme} {key}"}
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                if path.startswith("/v1/c"):
                    return await client.post(path, json=BODY | more, headers=headers)
                return await client.get(path, headers=headers)


run = asyncio.run


def check_refused(reply: httpx.Response) -> None:
    assert reply.status_code == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert error["message"]


def test_a_request_says_itself_whose_it_is():
    server = Server(TenantRules())
    for key in (None, ALICE):
        assert run(server.ask("/v1/completions", key, cache_salt="mine")).status_code == 200
        assert run(server.ask("/v1/completions", key)).status_code == 200
    assert server.salts == ["mine", None, "mine", None]


def test_the_key_says_whose_it_is_and_a_salt_nothing():
    server = Server(TenantRules(is_from_key=True))
    for key in (ALICE, BOB):
        assert run(server.ask("/v1/completions", key)).status_code == 200
        forged = run(server.ask("/v1/completions", key, cache_salt=key_salt(ALICE)))
        assert forged.status_code == 200
    assert server.salts == [key_salt(ALICE)] * 2 + [key_salt(BOB)] * 2
    assert len(set(server.salts)) == 2
    assert ALICE not in key_salt(ALICE)


@pytest.mark.parametrize(
    "tenants", [TenantRules(is_from_key=True), TenantRules(keys=Secret("none", tuple, frozenset))]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/models"])
def test_without_a_key_nothing_is_answered(tenants, path):
    server = Server(tenants)
    check_refused(run(server.ask(path)))
    check_refused(run(server.ask(path, "")))
    check_refused(run(server.ask(path, ALICE, scheme="Basic")))
    assert not server.salts


def test_only_listed_keys_are_let_in(tmp_path):
    path = written(tmp_path, f"# ours\n{ALICE}\n\n{BOB}\n")
    for is_from_key in (False, True):
        server = Server(TenantRules(is_from_key, api_keys(path)))
        for key in (ALICE, BOB):
            assert run(server.ask("/v1/completions", key)).status_code == 200
            assert run(server.ask("/v1/models", key, scheme="bearer")).status_code == 200
        for wrong in ("x" * 16, ALICE[:-1], ALICE + "0", ALICE.upper(), "# ours", f"{ALICE} {BOB}"):
            check_refused(run(server.ask("/v1/completions", wrong)))
        assert len(server.salts) == 2


def test_sums_over_tenants_are_told_on_this_node_alone():
    apart = TenantRules(is_from_key=True)
    assert run(Server(apart).ask("/metrics", ALICE)).status_code == 403
    for host in ("", "unknown", "10.0.0.1", "::ffff:10.0.0.1"):
        assert run(Server(apart, host).ask("/metrics", ALICE)).status_code == 403
    for host in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
        assert run(Server(apart, host).ask("/metrics")).status_code == 200
    assert run(Server(TenantRules()).ask("/metrics")).status_code == 200
    for probe in ("/healthz", "/readyz"):
        assert run(Server(apart).ask(probe)).status_code == 200


def written(directory: Path, text: str, mode: int = 0o600) -> Path:
    path = directory / "api-keys"
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("", 0o600, "contains no key"),
        ("# none\n\n", 0o600, "contains no key"),
        (f"{ALICE}\nshort", 0o600, "line 2"),
        (f"{ALICE} {BOB}", 0o600, "line 1"),
        ("gänsefüßchen-und-mehr", 0o600, "line 1"),
        (ALICE, 0o644, "chmod 600"),
    ],
)
def test_a_file_of_keys_that_will_not_do(tmp_path, text, mode, said):
    with pytest.raises(StartError, match=said) as refused:
        api_keys(written(tmp_path, text, mode))
    assert refused.value.field == "engine.api_keys_file"
    assert ALICE not in str(refused.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(StartError, match=r"api_keys_file.*cannot read"):
        api_keys(tmp_path / f"missing-{os.getpid()}")


def test_keys_show_nowhere(tmp_path):
    tenants = TenantRules(keys=api_keys(written(tmp_path, ALICE)))
    assert "digests" not in repr(tenants)
