"""Checks of the daemon: whether it is healthy, or could start."""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from kvtier import __version__
from kvtier.api.http.tenant import api_keys
from kvtier.api.rpc.credentials import Credentials
from kvtier.certificate import Certificates, read_authorities
from kvtier.cli.call import fetch_status
from kvtier.cli.doctor.check import CheckContext, Finding, RunningDaemon, fail, ok, warn
from kvtier.cli.preflight import check_free, check_socket
from kvtier.config import Config, ListenAddress
from kvtier.config.model import with_secrets
from kvtier.daemon.tiers.opening import load_keys
from kvtier.engine.support import check_model
from kvtier.errors import StartError
from kvtier.tiers.redis.settings import redis_settings
from kvtier.transfer.ticket_server import peer_of

__all__ = [
    "inspect_daemon",
    "inspect_files",
    "inspect_ports",
    "inspect_socket",
]

_ANSWER_S = 2.0
_HEALTH_PAGE = "docs/operations/health.md"
_HEALTH_PAGE = "docs/operations/health.md"

_LISTEN = "0A"
"""State of a listening socket in /proc/net/tcp."""


def inspect_daemon(config: Config, on_found: Callable[[RunningDaemon], None]) -> Finding:
    """Check the health of the daemon on the configured socket, if one runs.

    Calls ``on_found`` with it, even if it does not answer.
    """
    path, user = config.daemon.socket, os.geteuid()
    running = _served_by(path)
    if running is None:
        return ok(f"not running at {path}")
    on_found(running)
    if running.uid is not None and user not in {0, running.uid, *config.daemon.allowed_uids}:
        return warn(
            f"{path} belongs to user {running.uid}, and does not serve user {user}",
            "run this as that user or root, or add yours to daemon.allowed_uids",
        )
    document = fetch_status(path, _ANSWER_S)
    found = f"kvtier {document['version']} runs as pid {document['pid']}"
    ailing = [
        f"{name} is {tier['state']} ({tier['reason']})"
        for name, tier in document["tiers"].items()
        if tier.get("state") in {"degraded", "out"}
    ]
    if ailing:
        return warn(f"{found}; {', '.join(ailing)}", f"see {_HEALTH_PAGE}")
    if document["version"] != __version__:
        return warn(f"{found}, but {__version__} is installed", "restart it")
    return ok(f"{found}, all tiers are up")


def _served_by(path: Path) -> RunningDaemon | None:
    """Return the process that listens; None if there is none, as for a stale socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_ANSWER_S)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except PermissionError:
            return RunningDaemon(0, _owner_of(path))
        except OSError:
            return RunningDaemon(0)  # the status call reports why
        return RunningDaemon(*peer_of(probe))


def _owner_of(path: Path) -> int:
    """Return the owner of a path, or of the first parent that can be seen."""
    for each in (path, *path.parents):
        with contextlib.suppress(OSError):
            return each.stat().st_uid
    return 0


def inspect_socket(context: CheckContext) -> Finding:
    """Check that the socket can be created, and reached by the allowed users."""
    daemon = context.config.daemon
    if context.running:
        return ok(f"{daemon.socket}, in use by the running daemon")
    folder = next(path for path in daemon.socket.parents if path.exists())
    if folder == daemon.socket.parent:
        owner = folder.stat().st_uid
        # Root checks on behalf of the daemon's user, who owns the directory.
        uid = owner if os.geteuid() == 0 else os.geteuid()
        check_socket(daemon.socket, uid, is_shared=bool(daemon.allowed_uids))
    if not os.access(folder, os.W_OK | os.X_OK):
        return fail(
            f"user {os.geteuid()} cannot write to {folder}",
            f"run mkdir -p {daemon.socket.parent}, and chown it to the daemon's user",
        )
    others = (
        f"users {', '.join(map(str, daemon.allowed_uids))}"
        if daemon.allowed_uids
        else "its own user and root"
    )
    return ok(f"{daemon.socket}, for {others}")


def inspect_ports(context: CheckContext) -> Finding:
    """Check that each port is free, or used by the running daemon."""
    config = context.config
    wanted: dict[str, ListenAddress | None] = {
        "http.listen": config.http.listen,
        "rpc.listen": config.rpc.listen,
        "engine.listen": config.engine.listen if config.engine.model else None,
    }
    ours = _held(context.running)
    daemons_user = context.running.uid if context.running and ours is None else None
    found = []
    for field, address in wanted.items():
        if address is None:
            continue
        if ours and address.port in ours:
            found.append(f"{address} is used by the running daemon")
            continue
        try:
            check_free(field, address)
        except StartError as error:
            user = _listener(context, address.port)
            if user is not None and user == daemons_user:
                found.append(f"{address} is used by user {user}, who also runs the daemon")
                continue
            whose = "" if user is None else f", used by user {user}"
            remedy = f"find the process with ss -ltnp 'sport = :{address.port}'"
            return fail(f"{field}: {error.problem}{whose}", remedy)
        found.append(f"{address} is free")
    return ok(", ".join(found) or "none configured")


def _held(running: RunningDaemon | None) -> set[int] | None:
    """Return the TCP ports of the daemon and its children; None if they cannot be seen."""
    ports: set[int] = set()
    try:
        main = psutil.Process(running.pid) if running else None
        for one in [main, *main.children(recursive=True)] if main else []:
            listening = one.net_connections(kind="tcp")
            ports |= {each.laddr.port for each in listening if each.status == psutil.CONN_LISTEN}
    except psutil.Error:
        return None
    return ports


def _listener(context: CheckContext, port: int) -> int | None:
    """Return the user who listens on a TCP port."""
    for name in ("proc/net/tcp", "proc/net/tcp6"):
        for line in context.read(name).splitlines()[1:]:
            _, local, _, state, _, _, _, user, *_ = line.split()
            if state == _LISTEN and int(local.rpartition(":")[2], 16) == port:
                return int(user)
    return None


def inspect_files(context: CheckContext) -> Finding:
    """Read the configured keys, certificates and model, as a start would."""
    config = context.config
    named: list[str] = []
    certificates: dict[str, Certificates] = {}
    if config.seal.key_file is not None:
        load_keys(config)
        named.append("seal.key_file")
    with_secrets(config)
    named += [
        f"{name}.{section.file_backed_key}_file"
        for name, section in config.tiers.items()
        if section.secret_file is not None
    ]
    if config.rpc.listen is not None:
        certificates["rpc.tls_cert"] = Credentials(config.rpc).identity.value.certificate
        named.append("rpc.*")
    if (tls_ca := redis_settings(config).tls_ca) is not None:
        found = read_authorities(tls_ca, "remote.tls_ca")
        certificates["remote.tls_ca"] = found
        named.append("remote.tls_ca")
    if config.engine.api_keys_file is not None:
        api_keys(config.engine.api_keys_file)
        named.append("engine.api_keys_file")
    if config.engine.model is not None:
        check_model(config.engine.model, config.engine.context_limit)
        named.append("engine.model")
    now_s = time.time()
    late = [f"{key} {why}" for key, each in certificates.items() if (why := each.complaint(now_s))]
    if late:
        return warn(", ".join(late), "renew it in place: a running daemon reloads it automatically")
    return ok(f"{', '.join(named)} can be read" if named else "none configured")
