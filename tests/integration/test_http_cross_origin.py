"""Which web pages may use the HTTP servers, and which host names these accept."""

import asyncio
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page
from prometheus_client import CollectorRegistry
from starlette.responses import PlainTextResponse

from kvtier.api.http.app import create_app
from kvtier.api.http.chain import ChainIdentity
from kvtier.api.http.cross_origin import CrossOriginGuard, CrossOriginRules
from kvtier.api.http.daemon_app import create_daemon_app
from kvtier.api.http.server import HttpServer, serve
from kvtier.api.http.tenant import TenantRules, api_keys
from kvtier.testing.engine_service import ByteChatModel, FakeEngineService

KEY = "alice-0123456789abcdef"
CHAT_APP = "http://127.0.0.1:3000"
BODY = {"model": "byte-model", "prompt": "hello", "max_tokens": 2}
OWN_NAME = socket.gethostname()


class Tripping(ByteChatModel):
    """A model whose tokenizer raises an unexpected exception."""

    def encode(self, text: str) -> list[int]:
        if text == "trip":
            raise RuntimeError("secret")
        return super().encode(text)


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngineService]:
    with FakeEngineService() as engine:
        yield engine


def app_of(engine: FakeEngineService, keys: Path | None = None):
    return create_app(
        engine,
        Tripping(),
        registry=CollectorRegistry(),
        tenants=TenantRules(keys=api_keys(keys) if keys else None),
        identity=ChainIdentity(bytes(16), 4),
    )


@pytest.fixture(scope="module")
def open_url(engine: FakeEngineService) -> Iterator[str]:
    with serve(app_of(engine), "127.0.0.1", 0) as server:
        yield server.url


@pytest.fixture(scope="module")
def guarded_url(engine: FakeEngineService, tmp_path_factory) -> Iterator[str]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{KEY}\n")
    keys.chmod(0o600)
    with serve(app_of(engine, keys), "127.0.0.1", 0) as server:
        yield server.url


@pytest.fixture(scope="module")
def allowing(engine: FakeEngineService) -> Iterator[HttpServer]:
    allowed = CrossOriginRules(hosts=["Chat.example"], origins=[CHAT_APP])
    with serve(app_of(engine), "127.0.0.1", 0, allowed=allowed) as server:
        yield server


@pytest.fixture(scope="module")
def daemon_url() -> Iterator[str]:
    app = create_daemon_app(
        complaint=str, is_ready=lambda: True, report=dict, registry=CollectorRegistry()
    )
    with serve(app, "127.0.0.1", 0) as server:
        yield server.url


ROUTES = [
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/no/such/route"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/kvtier/chain"),
    ("OPTIONS", "/v1/completions"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_refuses_a_foreign_host_and_a_foreign_origin(
    engine, open_url, guarded_url, daemon_url, method, path
):
    seen = len(engine.requests)
    for url in (open_url, guarded_url, daemon_url):
        for headers, status, code in (
            ({"host": "evil.example"}, 421, "wrong_host"),
            ({"host": "evil.example", "origin": "http://evil.example"}, 421, "wrong_host"),
            ({"origin": "http://evil.example"}, 403, "wrong_origin"),
            ({"sec-fetch-site": "cross-site"}, 403, "wrong_origin"),
        ):
            headers["authorization"] = f"Bearer {KEY}"
            reply = httpx.request(method, url + path, headers=headers, json=BODY)
            assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
            assert not any(name.startswith("access-control") for name in reply.headers)
    assert len(engine.requests) == seen


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9464", 200),
        ("127.0.0.1", 200),
        ("0.0.0.0:9464", 200),
        ("10.1.2.3:9464", 200),
        ("[::1]:9464", 200),
        ("[fe80::1%25eth0]", 200),
        ("localhost:9464", 200),
        ("LocalHost", 200),
        ("localhost.:9464", 200),
        ("kvtier.localhost:80", 200),
        (f"{OWN_NAME.upper()}:9464", 200),
        ("", 200),
        ("evil.example:9464", 421),
        ("evil.example.", 421),
        ("127.0.0.1.evil.example:9464", 421),
        ("evil.example:9464:80", 421),
        ("[::1].evil.example", 421),
        ("[evil.example]", 421),
        ("localhost.evil.example", 421),
        ("evillocalhost", 421),
        ("another-machine", 421),
        ("user@localhost", 421),
        ("localhost, evil.example", 421),
        ("localhost/", 421),
        ("::1", 421),
        ("[", 421),
        (":9464", 421),
    ],
)
def test_over_loopback_a_host_must_name_this_machine(open_url, daemon_url, host, status):
    for url in (open_url, daemon_url):
        reply = httpx.get(f"{url}/healthz", headers={"host": host})
        assert reply.status_code == status
        if status == 421:
            assert "allowed_hosts" in reply.json()["error"]["message"], "the error names the remedy"


def test_a_host_can_be_allowed(allowing):
    for host, status in (("chat.example", 200), ("CHAT.example:8000", 200), ("evil.example", 421)):
        assert httpx.get(f"{allowing.url}/readyz", headers={"host": host}).status_code == status
    with serve(
        PlainTextResponse("ok"), "127.0.0.1", 0, allowed=CrossOriginRules(hosts=["*"])
    ) as server:
        assert httpx.get(server.url, headers={"host": "evil.example"}).text == "ok"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /healthz HTTP/1.0", 200),  # a health check without Host
        ("GET /healthz HTTP/1.0\r\nHost: evil.example", 421),
        ("GET /healthz HTTP/1.1", 400),
        ("GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: evil.example", 400),
        ("GET /healthz HTTP/1.1\r\nHost: local\u00e9", 421),
        # An absolute URI, which clients send to proxies; this server is not one.
        ("GET http://localhost/healthz HTTP/1.1\r\nHost: localhost", 404),
        ("GET http://evil.example/healthz HTTP/1.1\r\nHost: localhost", 404),
        ("GET http://localhost/healthz HTTP/1.1\r\nHost: evil.example", 421),
    ],
)
def test_odd_requests_get_a_definite_answer(open_url, daemon_url, head, status):
    for url in map(httpx.URL, (open_url, daemon_url)):
        with socket.create_connection((url.host, url.port), 20) as client:
            client.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode("latin-1"))
            answer = client.makefile("rb").read()
        assert int(answer.split()[1]) == status, answer


def status_at(address: str, **headers: str) -> int:
    """Return a server's response to a request that arrived at ``address``."""

    async def ask() -> int:
        transport = httpx.ASGITransport(
            CrossOriginGuard(PlainTextResponse("ok"), CrossOriginRules())
        )
        url = f"http://[{address}]" if ":" in address else f"http://{address}"
        async with httpx.AsyncClient(transport=transport, base_url=url) as client:
            return (await client.get("/metrics", headers=headers)).status_code

    with ThreadPoolExecutor(1) as thread:  # the browser's event loop runs in this thread
        return thread.submit(asyncio.run, ask()).result(20)


@pytest.mark.parametrize("address", ["10.1.2.3", "2001:db8::7"])
def test_probes_and_scrapes_by_the_address_of_a_pod_may_use_any_host(address):
    for host in ("kvtier.monitoring.svc.cluster.local:9464", "node7", address):
        assert status_at(address, host=host) == 200
    assert status_at(address, host="node7", origin="http://evil.example") == 403


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1"])
def test_any_loopback_address_counts_as_loopback(address):
    assert status_at(address, host="evil.example") == 421
    assert status_at(address, host="localhost") == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "same-origin"}, 200),
        # Behind a TLS proxy that replaces Host, the page's origin is that of the proxy.
        ({"sec-fetch-site": "same-origin", "origin": "https://chat.example"}, 200),
        ({"origin": "http://localhost:8000", "host": "localhost:8000"}, 200),
        ({"origin": "http://localhost:3000", "host": "localhost:8000"}, 403),
        ({"origin": "http://127.0.0.1:8000", "host": "localhost:8000"}, 403),
        ({"origin": "http://localhost.evil.example", "host": "localhost"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "null", "host": ""}, 403),
        ({"origin": "chrome-extension://abcdefgh"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "same-site", "origin": "http://localhost:3000"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "something-new"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-dest": "document"}, 403),  # a form
    ],
)
def test_only_the_servers_own_origin_may_post(engine, open_url, headers, status):
    seen = len(engine.requests)
    for kind in ("application/json", "text/plain"):
        reply = httpx.post(
            f"{open_url}/v1/completions",
            content=json.dumps(BODY),
            headers={"content-type": kind, **headers},
        )
        assert reply.status_code == status
        assert "access-control-allow-origin" not in reply.headers
    assert len(engine.requests) - seen == (2 if status == 200 else 0)


@pytest.mark.parametrize(
    ("dest", "status"), [("document", 200), ("iframe", 403), ("script", 403), ("empty", 403)]
)
def test_a_link_of_another_site_can_be_followed(daemon_url, dest, status):
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": dest}
    assert httpx.get(f"{daemon_url}/readyz", headers=headers).status_code == status


def test_an_allowed_origin_gets_its_preflight_answered(allowing):
    asked = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    url = f"{allowing.url}/v1/chat/completions"
    reply = httpx.options(url, headers={"origin": CHAT_APP, "sec-fetch-site": "same-site"} | asked)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == CHAT_APP
    assert reply.headers["access-control-allow-methods"] == "GET, POST"
    named = asked["access-control-request-headers"]
    assert reply.headers["access-control-allow-headers"] == named
    assert "access-control-allow-credentials" not in reply.headers
    reply = httpx.options(url, headers={"origin": "http://127.0.0.1:3001"} | asked)
    assert reply.status_code == 403
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        ("/v1/completions", {}, 200),
        ("/v1/completions", {"stream": True}, 200),
        ("/v1/completions", {"model": "another"}, 404),
        ("/v1/completions", {"prompt": "trip"}, 500),
        ("/v1/completions", {"top_p": "x"}, 400),
        ("/v1/nothing", {}, 404),
        ("/v1/models", {}, 405),
        ("/v1/kvtier/chain", {"max_tokens": None, "with_text": True}, 403),
    ],
)
def test_an_allowed_origin_can_read_every_answer(allowing, path, fields, status):
    headers = {"origin": CHAT_APP, "sec-fetch-site": "same-site"}
    reply = httpx.post(allowing.url + path, json=BODY | fields, headers=headers)
    assert reply.status_code == status
    assert reply.headers["access-control-allow-origin"] == CHAT_APP
    assert "Origin" in reply.headers["vary"]
    assert httpx.post(allowing.url + path, json=BODY | fields).status_code == status, "no browser"


def test_any_origin_can_be_allowed(engine):
    with serve(app_of(engine), "127.0.0.1", 0, allowed=CrossOriginRules(origins=["*"])) as server:
        for origin in ("http://evil.example", "null"):
            reply = httpx.get(f"{server.url}/v1/models", headers={"origin": origin})
            assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, "*")
        headers = {"host": "evil.example", "origin": "http://evil.example"}
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 421


# In a browser

ATTACK = """async (url) => {
  const post = {method: "POST", headers: {"content-type": "text/plain"}, body: JSON.stringify(
    {model: "byte-model", prompt: "hello", max_tokens: 1})};
  const json = {...post, headers: {"content-type": "application/json"}};
  const got = async (path, more) => {
    try { const reply = await fetch(url + path, more);
          return reply.type === "opaque" ? "opaque" : `${reply.status} ${await reply.text()}`; }
    catch { return "hidden"; } };
  const loads = (path) => new Promise((told) => {
    const script = document.createElement("script");
    script.onload = () => told("loaded"); script.onerror = () => told("hidden");
    script.src = url + path; document.head.append(script); });
  return [await got("/v1/models"), await got("/metrics"), await got("/v1/completions", post),
    await got("/v1/completions", json), await got("/v1/kvtier/chain", post),
    await got("/v1/completions", {...post, mode: "no-cors"}), await loads("/healthz")];
}"""


def visit(browser: Browser, address: str) -> Page:
    """Open an empty page with the origin ``address``, as if it came from another server."""
    page = browser.new_page()
    page.route(address, lambda route: route.fulfill(body="<p>hello", content_type="text/html"))
    page.goto(address)
    return page


@pytest.mark.slow
@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "evil.example"])
def test_a_page_of_another_origin_neither_reads_nor_triggers_anything(
    browser, engine, open_url, name
):
    seen = len(engine.requests)
    page = visit(browser, f"http://{name}:3001/page")
    port = httpx.URL(open_url).port
    for target in (open_url, f"http://evil.example:{port}"):
        assert page.evaluate(ATTACK, target) == ["hidden"] * 5 + ["opaque", "hidden"]
    # A form needs no script, and the response replaces the page.
    page.set_content(
        f'<form method="post" enctype="text/plain" action="{open_url}/v1/completions">'
        """<input name='{"model":"byte-model","prompt":"a' value='b"}'><button>go</button></form>"""
    )
    with page.expect_response("**/v1/completions") as answer:
        page.get_by_role("button").click()
    assert answer.value.status == 403
    assert len(engine.requests) == seen
    page.close()


@pytest.mark.slow
def test_a_page_whose_name_resolves_to_loopback_gets_nothing(browser, engine, open_url):
    seen = len(engine.requests)
    page = visit(browser, f"http://evil.example:{httpx.URL(open_url).port}/page")
    *answers, opaque, script = page.evaluate(ATTACK, "")
    assert all(answer.startswith("421 ") for answer in answers), answers
    assert opaque.startswith("421 ")
    assert script == "hidden"
    assert len(engine.requests) == seen
    page.close()


@pytest.mark.slow
def test_an_allowed_origin_streams_an_answer_in_a_browser(browser, allowing):
    page = visit(browser, f"{CHAT_APP}/page")
    answer = page.evaluate(
        """async (url) => (await fetch(url, {method: "POST", body: JSON.stringify({
          model: "byte-model", prompt: "hello", max_tokens: 2, stream: true}), headers: {
          "content-type": "application/json", "authorization": "Bearer x", "x-stainless-os": "a"}
        })).text()""",
        f"{allowing.url}/v1/completions",
    )
    assert answer.endswith("data: [DONE]\n\n")
    page.close()
