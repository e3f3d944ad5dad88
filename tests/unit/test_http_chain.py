"""``POST /v1/kvtier/chain``: the chain of a prompt as its blocks have it, and nobody else's."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from kvtier.api.http.app import create_app
from kvtier.api.http.chain import ChainIdentity, RecentPrompts
from kvtier.api.http.operator_socket import Operators, engine_socket
from kvtier.api.http.server import serve
from kvtier.api.http.tenant import TenantRules, api_keys, key_salt
from kvtier.core.identity import NO_TENANT, chain_root, hash_blocks, tenant_digest
from kvtier.testing.engine_service import ByteChatModel, FakeEngineService

SPACE = bytes(range(16))
BLOCK_TOKENS = 4
ALICE, EVE = "alice-0123456789abcdef", "eve-0123456789abcdef"

Json = dict[str, Any]


class Server:
    """An engine's server, called over its Unix socket, like operators do, or over TCP."""

    def __init__(self, url: str, unix_socket: Path) -> None:
        self.url = url
        self._operator = httpx.HTTPTransport(uds=str(unix_socket))

    def post(
        self, path: str, body: object, key: str = "", *, is_operator: bool = True
    ) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        with httpx.Client(transport=self._operator if is_operator else None, timeout=30) as client:
            return client.post(f"{self.url}{path}", content=content, headers=headers)

    def chain(self, key: str = "", *, is_operator: bool = True, **body: object) -> Json:
        reply = self.post("/v1/kvtier/chain", body, key, is_operator=is_operator)
        assert reply.status_code == 200, reply.text
        told: Json = reply.json()
        return told

    def complete(self, prompt: object, key: str = "", **more: object) -> None:
        body = {"model": "byte-model", "prompt": prompt, "max_tokens": 1} | more
        assert self.post("/v1/completions", body, key).status_code == 200


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    yield from served(TenantRules(), tmp_path / "k.sock")


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Server]:
    keys = tmp_path / "keys"
    keys.write_text(f"{ALICE}\n{EVE}\n")
    keys.chmod(0o600)
    yield from served(TenantRules(True, api_keys(keys)), tmp_path / "guarded.sock")


def served(tenants: TenantRules, daemon_socket: Path) -> Iterator[Server]:
    with FakeEngineService() as engine:
        app = create_app(
            engine,
            ByteChatModel(),
            registry=CollectorRegistry(),
            tenants=tenants,
            identity=ChainIdentity(SPACE, BLOCK_TOKENS),
        )
        with serve(app, "127.0.0.1", 0, operators=Operators(daemon_socket)) as listening:
            yield Server(listening.url, engine_socket(daemon_socket, listening.port))


def hashes(tokens: bytes, salt: str | None = None) -> list[str]:
    root = chain_root(SPACE, tenant_digest(salt))
    return [each.hex() for each in hash_blocks(root, list(tokens), BLOCK_TOKENS)]


def test_it_is_the_chain_that_the_engine_makes(server: Server) -> None:
    told = server.chain(prompt="twelve bytes and a tail")
    assert told["key_space"] == SPACE.hex()
    assert told["tenant"] == NO_TENANT.hex()
    assert told["block_tokens"] == BLOCK_TOKENS
    assert told["num_tokens"] == 23
    assert told["hashes"] == hashes(b"twelve bytes and a tail")
    assert len(told["hashes"]) == 5
    assert told["unsalted"] == []
    assert "text" not in told
    assert server.chain(token_ids=list(b"twelve bytes and a tail")) == told


def test_a_salt_makes_another_chain_and_the_unsalted_one_is_told_beside_it(server: Server) -> None:
    told = server.chain(prompt="eight by", cache_salt="mine")
    assert told["tenant"] == tenant_digest("mine").hex()
    assert told["hashes"] == hashes(b"eight by", "mine")
    assert told["unsalted"] == hashes(b"eight by")


def test_messages_go_through_the_chat_template(server: Server) -> None:
    messages = [{"role": "user", "content": "hello"}]
    prompt = ByteChatModel().apply_chat_template(messages)
    told = server.chain(messages=messages)
    assert told["num_tokens"] == len(prompt)
    root = chain_root(SPACE, NO_TENANT)
    assert told["hashes"] == [each.hex() for each in hash_blocks(root, prompt, BLOCK_TOKENS)]


def test_it_says_where_a_prompt_leaves_the_nearest_one(server: Server) -> None:
    assert server.chain(prompt="nobody was here")["has_nearest"] is False
    server.complete("a system prompt, and question one")
    server.complete("a system prompt, but another")
    server.complete("something else")
    told = server.chain(prompt="a system prompt, and question two", with_text=True)
    assert told["nearest_tokens"] == len("a system prompt, and question ")
    assert told["is_seen"] is False
    assert told["text"] == {"before": "uestion ", "here": "two", "there": "one"}


def test_over_tcp_nothing_is_told_of_recent_prompts(server: Server, guarded: Server) -> None:
    question: Json = {"prompt": "a system prompt, and question two"}
    for one, key in ((server, ""), (guarded, ALICE)):
        before = one.chain(key, is_operator=False, **question)
        one.complete("a system prompt, and question one", key)
        assert one.chain(key, is_operator=False, **question) == before
        told = one.chain(key, **question)
        assert told == before | {"is_seen": False, "nearest_tokens": 30, "has_nearest": True}
        reply = one.post("/v1/kvtier/chain", question | {"with_text": True}, key, is_operator=False)
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "operators_only")


def test_texts_keep_their_spaces(server: Server) -> None:
    server.complete("see the old hills")
    told = server.chain(prompt="see the old, green hills", with_text=True)
    assert told["text"] == {"before": " the old", "here": ", green hills", "there": " hills"}


def test_the_prompt_itself_is_not_its_own_neighbour(server: Server) -> None:
    server.complete("a system prompt, and question one")
    server.complete("a system prompt, and question two")
    server.complete("a system prompt, and question two and an answer")
    told = server.chain(prompt="a system prompt, and question two")
    assert told["is_seen"] is True
    assert told["nearest_tokens"] == len("a system prompt, and question ")
    server.complete("short")
    told = server.chain(prompt="shorter")
    assert told["nearest_tokens"] == 5, "it ends there"


def test_tenants_are_never_compared(server: Server, guarded: Server) -> None:
    for salt in (None, "another"):
        server.complete("a secret of one tenant", **({"cache_salt": salt} if salt else {}))
    told = server.chain(prompt="a secret of one tenant!", cache_salt="eve", with_text=True)
    assert (told["nearest_tokens"], told["is_seen"], told["has_nearest"]) == (0, False, False)
    assert told["text"]["there"] == ""
    guarded.complete("a secret of Alice", ALICE)
    assert guarded.chain(ALICE, prompt="a secret of Alice")["is_seen"] is True
    for forged in ({}, {"cache_salt": key_salt(ALICE)}, {"cache_salt": ALICE}):
        told = guarded.chain(EVE, prompt="a secret of Alice", with_text=True, **forged)
        assert (told["nearest_tokens"], told["is_seen"]) == (0, False)
        assert told["tenant"] == tenant_digest(key_salt(EVE)).hex()


def test_it_is_guarded_like_the_others(guarded: Server) -> None:
    for key in ("", "a-key-that-nobody-knows"):
        reply = guarded.post("/v1/kvtier/chain", {"prompt": "x"}, key)
        assert reply.status_code == 401
        assert reply.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not valid JSON"),
        ([], "must be a JSON object"),
        ({}, "exactly one of prompt, messages, token_ids"),
        ({"prompt": "a", "token_ids": [1]}, "exactly one"),
        ({"prompt": ["a", "b"]}, "only one prompt per call"),
        ({"prompt": ""}, "must not be empty"),
        ({"token_ids": [-1]}, "not in the vocabulary"),
        ({"token_ids": [10**6]}, "not in the vocabulary"),
        ({"token_ids": ["1"]}, "token_ids: must be"),
        ({"token_ids": [2**40]}, "not in the vocabulary"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"prompt": "a", "with_text": "yes"}, "must be true or false"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "a", "misspelt": 1}, "misspelt"),
        ({"prompt": "a", "model": "another"}, "model 'another' not found"),
        ({"prompt": "a" * 10_000_000}, "maximum context length"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(server: Server, body: object, says: str) -> None:
    reply = server.post("/v1/kvtier/chain", body)
    assert reply.status_code in {400, 404}, reply.text
    assert says in reply.json()["error"]["message"]


def test_without_an_identity_there_is_no_such_call() -> None:
    with FakeEngineService() as engine:
        app = create_app(engine, ByteChatModel(), registry=CollectorRegistry())
        with serve(app, "127.0.0.1", 0) as listening:
            reply = httpx.post(f"{listening.url}/v1/kvtier/chain", json={"prompt": "x"})
            assert reply.status_code == 404


@pytest.mark.slow
def test_recent_prompts_are_bounded_and_whoever_has_most_gives_way() -> None:
    recent = RecentPrompts(bytes_max=4 * 1000)
    recent.note(b"small", range(100))
    for number in range(50):
        recent.note(b"large", [number, *range(1, 100)])
    assert recent.nearest(b"small", range(100)).is_seen
    assert not recent.nearest(b"large", [0, *range(1, 100)]).is_seen
    assert recent.nearest(b"large", [49, *range(1, 100)]).is_seen
    recent.note(b"huge", range(2000))
    assert not recent.nearest(b"huge", range(2000)).is_seen, "too large to be kept at all"
    assert recent.nearest(b"small", range(100)).is_seen
    for number in range(5000):
        recent.note(b"%d" % number, [1])
    assert len(recent._by_tenant) == 1000, "four bytes each"
