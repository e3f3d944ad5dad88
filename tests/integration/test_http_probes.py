"""Health, readiness, metrics, routes, bodies and ports."""

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, disable_created_metrics
from starlette.applications import Starlette

from kvtier.api.http.app import create_app
from kvtier.api.http.daemon_app import create_daemon_app
from kvtier.api.http.limits import ServerLimits
from kvtier.api.http.server import HttpServer, serve
from kvtier.errors import StartError
from kvtier.testing.engine_service import ByteChatModel, FakeEngineService


class Tripping(ByteChatModel):
    """A model whose tokenizer raises an unexpected exception."""

    def encode(self, text: str) -> list[int]:
        if text == "trip":
            raise RuntimeError("secret")
        return super().encode(text)


@pytest.fixture(scope="module")
def service() -> Iterator[tuple[FakeEngineService, HttpServer]]:
    disable_created_metrics()  # as kvtier.observe.metrics does in every process
    registry = CollectorRegistry()
    counter = Counter("kvtier_things_total", "Things.", ["tier"], registry=registry)
    for number in range(300):
        counter.labels(tier=f"tier {number}").inc()
    limits = ServerLimits(body_bytes=100_000, body_seconds=0.2)
    with FakeEngineService() as engine:
        app = create_app(engine, Tripping(), registry=registry, limits=limits)
        with serve(app, "127.0.0.1", 0) as server:
            yield engine, server


@pytest.fixture
def engine(service) -> Iterator[FakeEngineService]:
    engine = service[0]
    yield engine
    engine.is_ready, engine.is_stuck = True, False


@pytest.fixture
def client(service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service[1].url, timeout=20) as client:
        yield client


def test_health_follows_the_engine(engine, client):
    assert client.get("/healthz").status_code == 200
    assert client.get("/readyz").status_code == 200
    engine.is_ready = False
    assert client.get("/healthz").status_code == 200
    assert client.get("/readyz").status_code == 503
    engine.is_stuck = True
    assert client.get("/healthz").status_code == 503


def test_metrics_come_from_the_registry_and_fast(client):
    seconds = []
    for _ in range(5):  # the best of five, of this process alone: others may hold the cores
        began = time.process_time()
        response = client.get("/metrics")
        seconds.append(time.process_time() - began)
    assert response.headers["content-type"].startswith("text/plain")
    assert 'kvtier_things_total{tier="tier 299"} 1.0' in response.text
    assert min(seconds) < 0.05
    # What Prometheus likes best takes five times as long; it takes the plain text as well.
    accept = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.5"
    again = client.get("/metrics", headers={"accept": accept})
    assert again.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert again.text == response.text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", "/v1/completions", 405),
        ("PUT", "/v1/chat/completions", 405),
        ("POST", "/metrics", 405),
    ],
)
def test_wrong_routes_are_refused_in_the_common_shape(client, method, path, status):
    response = client.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert path in error["message"]
    assert ("allow" in response.headers) == (status == 405)


def test_bad_json_is_refused(client):
    response = client.post("/v1/completions", content=b"{")
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]


def test_a_large_body_is_refused_by_its_declared_length(client):
    response = client.post("/v1/completions", content=b"x" * 10_000_000)
    assert response.status_code == 413
    assert "100000 bytes" in response.json()["error"]["message"]
    assert client.get("/healthz").status_code == 200


def test_a_large_body_is_refused_without_a_declared_length(client):
    pieces = (b"x" * 50_000 for _ in range(100))
    response = client.post("/v1/completions", content=pieces)
    assert response.status_code == 413


def test_a_body_that_trickles_is_refused(service):
    server = service[1]
    with socket.create_connection((server.host, server.port), timeout=20) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n"
        client.sendall(head + b"{")
        assert b" 408 " in client.recv(65536)


def test_a_bug_is_answered_without_its_trace(client):
    response = client.post("/v1/completions", json={"model": "byte-model", "prompt": "trip"})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert "Traceback" not in response.text


def daemon_app(
    complaint: Callable[[], str] = str,
    is_ready: Callable[[], bool] = lambda: True,
    tiers: Callable[[], dict[str, Any]] = dict,
    registry: CollectorRegistry | None = None,
) -> Starlette:
    return create_daemon_app(
        complaint=complaint,
        is_ready=is_ready,
        report=lambda: {"tiers": tiers()},
        registry=registry or CollectorRegistry(),
    )


def test_the_daemon_has_probes_and_nothing_else():
    state = {"complaint": "", "ready": False}
    tiers = {"ssd": {"state": "out", "reason": "no such directory"}}
    registry = CollectorRegistry()
    Counter("kvtier_things_total", "Things.", registry=registry)
    app = daemon_app(lambda: state["complaint"], lambda: state["ready"], lambda: tiers, registry)
    with (
        serve(app, "127.0.0.1", 0) as server,
        httpx.Client(base_url=server.url, timeout=20) as client,
    ):
        assert client.get("/healthz").status_code == 200
        assert client.get("/readyz").status_code == 503
        state["ready"] = True
        told = client.get("/readyz")
        assert told.status_code == 200, "a tier that is out makes no daemon unready"
        assert told.json() == {"ready": True, "tiers": tiers}
        state["complaint"] = "the event loop has been stuck for 11 s"
        told = client.get("/healthz")
        assert (told.status_code, told.text) == (503, state["complaint"])
        assert "kvtier_things_total 0.0" in client.get("/metrics").text
        assert client.post("/v1/completions").json()["error"]["code"] is None


def test_a_port_in_use_names_the_field_and_the_remedy(service):
    server = service[1]
    app = daemon_app()
    with pytest.raises(StartError, match=r"http\.listen: .*in use.*free port") as caught:
        serve(app, server.host, server.port, field="http.listen")
    assert caught.value.field == "http.listen"


@pytest.mark.parametrize(
    ("host", "port"), [("192.0.2.1", 0), ("no such host", 0), ("::1", 1 << 20)]
)
def test_an_address_that_cannot_be_had_is_refused(host, port):
    app = daemon_app()
    with pytest.raises(StartError, match=r"engine\.listen"):
        serve(app, host, port, field="engine.listen")


@pytest.mark.slow
def test_a_stopped_server_leaves_its_port():
    app = daemon_app()
    with serve(app, "127.0.0.1", 0) as first:
        assert httpx.get(f"{first.url}/healthz").status_code == 200
    first.stop()
    with serve(app, "127.0.0.1", first.port) as second:
        assert httpx.get(f"{second.url}/healthz").status_code == 200
