"""Secrets that change under a running daemon, as Kubernetes and cert-manager change them."""

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from kvtier.api.rpc.operator_client import RemoteDaemon, remote_operator
from kvtier.cli.main import main
from kvtier.observe.daemon_metrics import (
    CERTIFICATE_NOT_AFTER,
    CERTIFICATE_NOT_BEFORE,
    SECRET_REFUSED,
)
from kvtier.testing.child import Child, await_true, free_port, work_directory
from kvtier.testing.running_node import RunningNode
from kvtier.v1 import operator_pb2 as pb
from tests.integration.certificates import write_secret
from tests.integration.pattern import PatternEngine
from tests.integration.redis_child import RedisServer
from tests.programs import faketime_library, requires

pytestmark = pytest.mark.slow

OLD, NEW = "token-of-old-0123456789", "token-of-new-0123456789"

_SAYS = "new secret rejected, keeping the previous one"


class Volume:
    """A Secret as the kubelet mounts it: links into a folder that is exchanged as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, bytes] = {}
        self._num_written = 0
        path.mkdir()

    def __getitem__(self, name: str) -> str:
        return str(self.path / name)

    def write(self, mode: int = 0o600, **files: str | bytes) -> None:
        """Exchange files; ``_`` in a name stands for the dot."""
        self._num_written += 1
        for name, content in files.items():
            said = content.encode() if isinstance(content, str) else content
            self._files[name.replace("_", ".")] = said
        folder = self.path / f"..{self._num_written}"
        folder.mkdir()
        for name, said in self._files.items():
            write_secret(folder / name, said, mode)
            if not (self.path / name).is_symlink():
                (self.path / name).symlink_to(f"..data/{name}")
        (self.path / "..new").symlink_to(folder.name)
        (self.path / "..new").replace(self.path / "..data")


class Openssl:
    """Authorities and certificates that openssl makes, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def authority(self, name: str) -> bytes:
        return self._made(name)["crt"]

    def pair(self, authority: str, kind: str = "P-256", age_days: int = 0) -> dict[str, bytes]:
        """Return a certificate that descends from an authority, with its key, for 90 days."""
        signed = ["-CA", f"{authority}.crt", "-CAkey", f"{authority}.key"]
        names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        more = [*signed, *names]
        made = self._made(f"of-{authority}", *more, kind=kind, age_days=age_days)
        return {"tls_crt": made["crt"], "tls_key": made["key"]}

    def not_after(self, certificate: bytes) -> float:
        """Return when a certificate expires, as openssl says it."""
        words = [requires("openssl"), "x509", "-noout", "-enddate", "-dateopt", "iso_8601"]
        done = subprocess.run(words, input=certificate, capture_output=True, check=True)
        date = done.stdout.decode().strip().removeprefix("notAfter=")
        told = subprocess.run(["date", "+%s", "-d", date], capture_output=True, check=True)
        return float(told.stdout)

    def _made(
        self, name: str, *more: str, kind: str = "P-256", age_days: int = 0
    ) -> dict[str, bytes]:
        words = [
            requires("openssl"),
            "req",
            "-x509",
            "-nodes",
            "-days",
            "90",
            "-subj",
            f"/CN={name}",
        ]
        words += ["-newkey", "ec", "-pkeyopt", f"ec_paramgen_curve:{kind}", *more]
        words += ["-keyout", f"{name}.key", "-out", f"{name}.crt"]
        past = {"LD_PRELOAD": faketime_library(), "FAKETIME": f"-{age_days}d"} if age_days else {}
        subprocess.run(
            words, cwd=self.folder, capture_output=True, check=True, timeout=30,
            env=os.environ | past,
        )  # fmt: skip
        return {part: (self.folder / f"{name}.{part}").read_bytes() for part in ("crt", "key")}


@pytest.fixture
def directory() -> Iterator[Path]:
    with work_directory() as directory:
        yield directory


@pytest.fixture
def openssl(directory: Path) -> Openssl:
    folder = directory / "pki"
    folder.mkdir()
    return Openssl(folder)


def checked(node: RunningNode, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what ``kvtier stat --check`` prints."""
    capsys.readouterr()
    code = main(["stat", "--check", "--connect", str(node.socket)])
    said = capsys.readouterr().out
    assert code == bool(said)
    return said


# The operators' port


class Port:
    """A node whose daemon serves operators over TCP."""

    def __init__(self, directory: Path, openssl: Openssl) -> None:
        self.authority = openssl.authority("old")
        self.volume = Volume(directory / "rpc")
        self.volume.write(**openssl.pair("old"), token=f"{OLD}\n")
        self.address = f"localhost:{free_port()}"
        self.node = RunningNode(
            directory,
            {
                "rpc.listen": self.address.replace("localhost", "127.0.0.1"),
                "rpc.tls_cert": self.volume["tls.crt"],
                "rpc.tls_key": self.volume["tls.key"],
                "rpc.token_file": self.volume["token"],
                "ssd.enabled": "false",
            },
        )

    def answers(self, token: str, authority: bytes) -> grpc.StatusCode:
        """Make a new connection and a call over it; returns what becomes of that."""
        with remote_operator(RemoteDaemon(self.address, token, authority)) as stub:
            return code_of(lambda: stub.Ping(pb.PingRequest(), timeout=10))

    def is_refused(self, secret: str) -> bool:
        return self.node.metric(SECRET_REFUSED.name, secret=secret) == 1


def code_of(call: Callable[[], object]) -> grpc.StatusCode:
    try:
        call()
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


@pytest.fixture
def port(directory: Path, openssl: Openssl) -> Port:
    return Port(directory, openssl)


def test_certificate_and_token_are_exchanged_without_a_restart(
    port: Port, openssl: Openssl
) -> None:
    new = openssl.authority("new")
    with (
        port.node.daemon() as daemon,
        remote_operator(RemoteDaemon(port.address, OLD, port.authority)) as kept,
    ):
        assert code_of(lambda: kept.Ping(pb.PingRequest(), timeout=10)) is grpc.StatusCode.OK
        pair = openssl.pair("new")
        port.volume.write(**pair, token=f"{NEW}\n{OLD}\n")
        await_true(lambda: port.answers(NEW, new) is grpc.StatusCode.OK, "the new ones count", 20)
        assert port.answers(OLD, new) is grpc.StatusCode.OK, "and the old token meanwhile"
        assert port.answers(NEW, port.authority) is grpc.StatusCode.UNAVAILABLE
        assert code_of(lambda: kept.Ping(pb.PingRequest(), timeout=10)) is grpc.StatusCode.OK
        port.volume.write(token=f"{NEW}\n")
        await_true(
            lambda: (
                code_of(lambda: kept.Ping(pb.PingRequest(), timeout=10))
                is grpc.StatusCode.PERMISSION_DENIED
            ),
            "the old token counts no more, over an old connection either",
            20,
        )
        words = ["stat", "--json", "--connect", port.address, "--token-file"]
        (openssl.folder / "new.pem").write_bytes(new)
        shown = [*words, port.volume["token"], "--ca", str(openssl.folder / "new.pem")]
        assert main(shown) == 0
        until = port.node.metric(CERTIFICATE_NOT_AFTER.name, secret="rpc_certificate")
        assert until == openssl.not_after(pair["tls_crt"])
        since = port.node.metric(CERTIFICATE_NOT_BEFORE.name, secret="rpc_certificate")
        assert until - since == 90 * 86_400
        assert port.node.metric(CERTIFICATE_NOT_AFTER.name, secret="remote_ca") == 0
        for secret in (OLD, NEW, "PRIVATE"):
            assert secret not in daemon.log
        assert daemon.stop() == 0


def test_what_is_no_good_is_refused_and_said_once(
    port: Port, openssl: Openssl, capsys: pytest.CaptureFixture[str]
) -> None:
    with port.node.daemon() as daemon:
        good = openssl.pair("old")
        port.volume.write(**openssl.pair("old") | {"tls_key": good["tls_key"]}, token="short")
        await_true(lambda: port.is_refused("rpc_certificate"), "it is refused", 20)
        assert port.is_refused("rpc_token")
        assert port.answers(OLD, port.authority) is grpc.StatusCode.OK
        assert "rpc_certificate: rpc.tls_key: " in checked(port.node, capsys)
        port.volume.write(token=NEW)
        await_true(
            lambda: port.answers(NEW, port.authority) is grpc.StatusCode.OK,
            "the token waits for no certificate",
            20,
        )
        assert daemon.log.count(_SAYS) == 2, daemon.log
        assert "is not the key of the first certificate" in daemon.log
        port.volume.write(**good)
        await_true(lambda: not port.is_refused("rpc_certificate"), "a good one came", 20)
        assert not checked(port.node, capsys)
        assert daemon.stop() == 0


def test_who_asks_is_told_what_is_wrong(
    port: Port, openssl: Openssl, capsys: pytest.CaptureFixture[str]
) -> None:
    pair, chain = openssl.pair("old"), openssl.authority("old")
    with port.node.daemon() as daemon:
        for files, words in (
            (
                {"tls_crt": pair["tls_crt"] + chain[:-40]},
                "rpc.tls_cert: .* has a truncated certificate",
            ),
            ({"tls_crt": b""}, "rpc.tls_cert: .* contains no certificate"),
            (pair | {"tls_key": b"\0\1\2"}, "rpc.tls_key: .* is not a private key"),
            (openssl.pair("old", "secp521r1"), "rpc.tls_key: gRPC does not support the type of"),
            ({**pair, "token": ""}, "rpc.token_file: .* contains no token"),
        ):
            port.volume.write(**files)
            capsys.readouterr()
            assert main(["config", "reload", "--connect", str(port.node.socket)]) == 1, words
            said = capsys.readouterr()
            assert re.search(words, said.out + said.err), said
            assert port.answers(OLD, port.authority) is grpc.StatusCode.OK
        port.volume.write(mode=0o644, token=NEW)
        daemon.send(signal.SIGHUP)
        daemon.await_log(r"rpc\.token_file: other users can access")
        assert port.answers(NEW, port.authority) is grpc.StatusCode.PERMISSION_DENIED
        port.volume.write()
        daemon.send(signal.SIGHUP)
        daemon.await_log(r"secret reloaded.* secret=rpc_token")
        assert port.answers(NEW, port.authority) is grpc.StatusCode.OK
        assert daemon.stop() == 0


def test_one_that_expires_is_told_of(
    port: Port, openssl: Openssl, capsys: pytest.CaptureFixture[str]
) -> None:
    port.volume.write(**openssl.pair("old", age_days=80))
    with port.node.daemon() as daemon:
        assert "rpc_certificate: expires on " in checked(port.node, capsys)
        main(["doctor", "--json", *port.node.arguments()])
        checks = {each["check"]: each for each in json.loads(capsys.readouterr().out)["checks"]}
        assert checks["files"]["verdict"] == "warn"
        assert "rpc.tls_cert expires on " in checks["files"]["found"]
        port.volume.write(**openssl.pair("old", age_days=100))
        daemon.await_log("secret reloaded")
        assert "rpc_certificate: expired on " in checked(port.node, capsys)
        assert port.answers(OLD, port.authority) is grpc.StatusCode.UNAVAILABLE
        port.volume.write(**openssl.pair("old"))
        await_true(lambda: not checked(port.node, capsys), "a good one came", 20)
        assert port.answers(OLD, port.authority) is grpc.StatusCode.OK
        assert daemon.stop() == 0


# Redis


class Shared:
    """A Redis with TLS and a login, and a node that is told of both in files."""

    def __init__(self, directory: Path, openssl: Openssl) -> None:
        self.openssl = openssl
        requires("redis-server")  # Valkey from PyPI is built without TLS
        self.server = RedisServer(directory)
        self.tls_port = free_port()
        self.volume = Volume(directory / "redis")
        self.volume.write(ca_crt=openssl.authority("old"), url=self.url(OLD))
        self.node = RunningNode(
            directory,
            {
                "remote.url_file": self.volume["url"],
                "remote.tls_ca": self.volume["ca.crt"],
                "remote.deadline": "2s",
                "ssd.enabled": "false",
            },
        )
        self._num_prompts = 0

    def url(self, password: str, port: int = 0) -> str:
        return f"rediss://kv:{password}@127.0.0.1:{port or self.tls_port}/0\n"

    @contextlib.contextmanager
    def serving(self) -> Iterator[Child]:
        with self.server.start(), self.server.client() as self.client:
            self.have_password(OLD)
            self.have_certificate("old")
            with self.node.daemon() as daemon:
                yield daemon
                assert daemon.stop() == 0

    def have_password(self, password: str) -> None:
        self.client.acl_setuser(
            "kv", enabled=True, reset_passwords=True, passwords=[f"+{password}"],
            keys=["*"], commands=["+@all"],
        )  # fmt: skip
        self.cut()

    def have_certificate(self, authority: str) -> None:
        pair = self.openssl.pair(authority)
        folder = self.openssl.folder
        for name, content in pair.items():
            (folder / name).write_bytes(content)
        self.client.config_set("tls-auth-clients", "no")
        self.client.config_set("tls-ca-cert-file", str(folder / f"{authority}.crt"))
        self.client.config_set(
            "tls-key-file", str(folder / "tls_key"), "tls-cert-file", str(folder / "tls_crt")
        )
        self.client.config_set("tls-port", self.tls_port)
        self.cut()

    def cut(self) -> None:
        self.client.execute_command("CLIENT", "KILL", "USER", "kv")

    def works(self) -> bool:
        """Tell whether blocks come back over connections made from now on."""
        self.cut()
        self._num_prompts += 1
        with PatternEngine(self.node.socket) as engine:
            engine.store(self._num_prompts)
            self.node.await_idle()
            self.node.drop("cpu")
            return engine.load(self._num_prompts) == (["remote"] * 4, "complete")

    def await_reason(self, word: str) -> None:
        """Wait until the tier is out for such a reason."""
        await_true(lambda: word in self.node.await_state("remote", "out", timeout_s=20), word, 20)

    def await_work(self) -> None:
        await_true(self.works, "blocks come back from the server", 30)


@pytest.fixture
def shared(directory: Path, openssl: Openssl) -> Shared:
    return Shared(directory, openssl)


@pytest.mark.redis
def test_the_password_of_redis_is_exchanged_without_a_restart(shared: Shared) -> None:
    with shared.serving() as daemon:
        shared.await_work()
        shared.have_password(NEW)
        shared.await_reason("password")
        shared.volume.write(url=shared.url(NEW))
        shared.await_work()
        place = f"rediss://***@127.0.0.1:{shared.tls_port}/0"
        assert place in daemon.log
        shared.volume.write(url=shared.url(NEW, free_port()))
        daemon.await_log(f"{_SAYS}.*needs a restart, or `kvtier tier detach remote` first")
        await_true(
            lambda: shared.node.metric(SECRET_REFUSED.name, secret="remote_url") == 1,
            "another server takes more than that",
        )
        shared.await_work()
        shared.volume.write(url="nonsense")
        daemon.await_log(f"{_SAYS}.*does not contain the URL of a Redis server")
        shared.volume.write(url=shared.url(NEW))
        await_true(
            lambda: shared.node.metric(SECRET_REFUSED.name, secret="remote_url") == 0,
            "it is good again",
            20,
        )
        assert daemon.log.count(_SAYS) == 2
        for secret in (OLD, NEW):
            assert secret not in daemon.log


@pytest.mark.redis
def test_the_authority_of_redis_is_exchanged_without_a_restart(shared: Shared) -> None:
    new = shared.openssl.authority("new")
    with shared.serving() as daemon:
        shared.await_work()
        shared.volume.write(ca_crt=new[:-30])
        daemon.await_log(f"{_SAYS}.*remote.tls_ca: .* has an invalid certificate")
        shared.await_work()
        assert shared.node.metric(SECRET_REFUSED.name, secret="remote_ca") == 1
        shared.have_certificate("new")
        shared.await_reason("certificate")
        shared.volume.write(ca_crt=new)
        shared.await_work()
        until = shared.node.metric(CERTIFICATE_NOT_AFTER.name, secret="remote_ca")
        assert until == shared.openssl.not_after(new)


# What seals blocks


def test_keys_are_exchanged_without_a_signal(directory: Path) -> None:
    keys = Volume(directory / "seal")
    one, two = f"one {'a1' * 32}\n", f"two {'b2' * 32}\n"
    keys.write(keys=one)
    node = RunningNode(directory, {"seal.key_file": keys["keys"], "ssd.seal": "encrypt"})
    with node.daemon() as daemon, PatternEngine(node.socket) as engine:
        assert engine.store(1) == 4
        node.await_blocks("ssd", 4)
        keys.write(keys=two + one)
        daemon.await_log("secret reloaded.* secret=seal_keys")
        assert engine.store(2) == 4
        node.await_blocks("ssd", 8)
        node.drop("cpu")
        assert [engine.load(prompt)[1] for prompt in (1, 2)] == ["complete"] * 2
        keys.write(keys=two)
        await_true(lambda: daemon.log.count("secret reloaded") == 2, "one is retired", 20)
        node.await_idle()
        node.drop("cpu")
        assert engine.load(2) == (["ssd"] * 4, "complete")
        assert engine.load(1)[0] == [], "nobody can read them any more"
        assert node.metric("kvtier_miss_blocks_total", tier="ssd", reason="seal") > 0
        assert daemon.stop() == 0
