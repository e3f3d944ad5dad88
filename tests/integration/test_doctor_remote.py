"""What the doctor says of real servers, however they are set or suffer."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvtier.cli.doctor.check import Check, Finding, run_checks
from kvtier.config import load_config
from kvtier.testing.child import work_directory
from kvtier.tiers.finding import KernelFiles
from kvtier.tiers.redis.doctor import redis_checks
from kvtier.tiers.redis.settings import redis_settings
from tests.integration.redis_child import RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.redis]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with work_directory() as directory:
        server = RedisServer(directory)
        with server.start("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"):
            yield server


def found(url: str) -> Finding:
    (check,) = redis_checks(redis_settings(load_config(None, {"remote.url": url}, {})))
    check = Check("remote", partial(check.inspect, KernelFiles()), check.deadline_s)
    ((_, finding),) = run_checks([check])
    return finding


@pytest.mark.parametrize(
    ("settings", "verdict", "words"),
    [
        ({}, "ok", "allkeys-lru"),
        ({"maxmemory": "0"}, "warn", "without maxmemory"),
        ({"maxmemory-policy": "noeviction"}, "warn", "rejects new blocks once it is full"),
        ({"maxmemory-policy": "noeviction", "maxmemory": "1"}, "fail", "full"),
    ],
)
def test_settings(server: RedisServer, settings: dict[str, str], verdict: str, words: str) -> None:
    usual = {"maxmemory": "64mb", "maxmemory-policy": "allkeys-lru"}
    with server.client() as client:
        for name, value in (usual | settings).items():
            client.config_set(name, value)
        finding = found(server.url)
        assert (finding.verdict, bool(finding.remedy)) == (verdict, verdict != "ok")
        assert words in finding.found
        assert client.dbsize() == 0, "nothing was written"


def test_a_replica_takes_no_blocks(server: RedisServer) -> None:
    with server.client() as client:
        client.replicaof("127.0.0.1", "1")
        try:
            assert "a replica" in found(server.url).found
        finally:
            client.replicaof("NO", "ONE")


def test_a_wrong_password_is_not_repeated(server: RedisServer) -> None:
    finding = found(server.url.replace("//", "//user:geheim@"))
    assert finding.verdict == "fail"
    assert "password" in finding.found
    assert "geheim" not in str(finding)


def test_one_that_is_silent_is_given_up(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    with server.start() as child, child.stopped():
        assert found(server.url).verdict == "fail"
