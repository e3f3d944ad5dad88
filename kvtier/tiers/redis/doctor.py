"""Checks of the remote tier's servers for ``kvtier doctor``."""

import time
from collections.abc import Mapping, Sequence
from functools import partial

from kvtier.config.units import format_bytes, format_seconds
from kvtier.errors import TierError
from kvtier.tiers.finding import CheckVerdict, Finding, KernelFiles, TierCheck, fail, ok, warn
from kvtier.tiers.redis.address import Form, RedisAddress, ServerAddress
from kvtier.tiers.redis.connection import Connector
from kvtier.tiers.redis.resp import ErrorReply, RespCommand
from kvtier.tiers.redis.server import Server, reply_fields
from kvtier.tiers.redis.settings import RedisConfig
from kvtier.tiers.redis.topology import Topology

__all__ = ["inspect_servers", "redis_checks"]

_DEADLINE_S = 5.0
"""Time to find and query the servers; the daemon's calls have far less."""

_PATIENCE_S = 2.0
"""Timeout of one connection or reply."""

_SECTIONS = (b"server", b"memory", b"replication")
_OLDEST = 6
"""Oldest tested major version."""


def redis_checks(settings: RedisConfig) -> Sequence[TierCheck]:
    """Return the check of the servers."""
    hung = "check the network and the server, or fix remote.url"
    return (TierCheck("remote", partial(inspect_servers, settings), hung, _DEADLINE_S),)


def inspect_servers(remote: RedisConfig, _kernel: KernelFiles) -> Finding:
    """Check each primary, and return the worst finding."""
    address = RedisAddress.parse(remote.url)
    topology = _topology(address, remote)
    deadline_ns = time.monotonic_ns() + int(_DEADLINE_S * 0.8e9)
    try:
        findings = [
            _judge(server.place, *_ask(server, deadline_ns))
            for server in topology.primaries(deadline_ns)
        ]
    except TierError as error:
        return fail(str(error).removeprefix("remote: "), "start it, or fix remote.url")
    finally:
        topology.close()
    worst = max(findings, key=lambda finding: list(CheckVerdict).index(finding.verdict))
    is_open = not address.has_tls and remote.seal == "off"
    if worst.remedy or not is_open or all(map(_is_here, address.places)):
        return worst
    return warn(
        f"{worst.found}; KV blocks cross the network unencrypted, and could be altered",
        "use rediss:// and remote.seal",
    )


def _topology(address: RedisAddress, remote: RedisConfig) -> Topology:
    connector = Connector(address, _PATIENCE_S, remote.tls_ca)
    is_alone = address.form is not Form.CLUSTER
    return Topology(
        address,
        connector,
        lambda place: Server(place, connector, _PATIENCE_S, 1, is_alone=is_alone),
    )


def _ask(server: Server, deadline_ns: int) -> tuple[dict[str, str], float]:
    """Return a server's INFO, and the time of a PING."""
    questions = [RespCommand((b"INFO", section)) for section in _SECTIONS]
    facts: dict[str, str] = {}
    for reply in server.ask(questions, deadline_ns):
        if isinstance(reply, ErrorReply):
            raise TierError(f"{server.place} refused INFO (-{reply.code})")
        facts |= reply_fields(reply)
    asked_s = time.monotonic()
    server.ask([RespCommand((b"PING",))], deadline_ns)
    return facts, time.monotonic() - asked_s


def _judge(place: ServerAddress, facts: Mapping[str, str], took_s: float) -> Finding:
    kind = "valkey" if "valkey_version" in facts else "redis"
    version = facts.get(f"{kind}_version", "0")
    limit, used = int(facts.get("maxmemory", "0")), int(facts.get("used_memory", "0"))
    policy = facts.get("maxmemory_policy", "unknown")
    found = f"{kind} {version} at {place}, {format_seconds(took_s)}"
    if facts.get("role") == "slave":
        return fail(f"{found}: a replica, which cannot store blocks", "use the primary")
    if kind == "redis" and int(version.partition(".")[0]) < _OLDEST:
        return warn(f"{found}: untested old version", "use Redis 6 or newer, or Valkey")
    if not limit:
        return warn(
            f"{found}: without maxmemory it may use all memory of its machine", "set maxmemory"
        )
    found += f", {format_bytes(used)} of {format_bytes(limit)}, {policy}"
    if policy == "noeviction":
        remedy = "set maxmemory-policy volatile-ttl or allkeys-lru"
        if used >= limit:
            return fail(f"{found}: full", remedy)
        return warn(f"{found}: rejects new blocks once it is full", remedy)
    return ok(found)


def _is_here(place: ServerAddress) -> bool:
    return not place.port or place.host in {"localhost", "::1"} or place.host.startswith("127.")
