"""Advice: warns operators of a server's settings, once, in the log."""

import math

from kvtier.errors import TierError
from kvtier.observe.log import Log
from kvtier.tiers.remote.address import ServerAddress
from kvtier.tiers.remote.resp import Reply, RespCommand

__all__ = ["IDENTITY", "MEMORY", "QUESTIONS", "advise", "check_alone", "facts_of", "free_bytes"]

_log = Log("kvtier.remote")

MEMORY = RespCommand((b"INFO", b"memory"))
"""Asks a server how much memory it uses, and how much it may use."""

QUESTIONS = (MEMORY, RespCommand((b"INFO", b"cluster")))
"""Sent to a server on the first connection; an ACL may forbid them."""


IDENTITY = RespCommand((b"INFO", b"server"))
"""Sent to a server on each connection: its ``run_id`` changes when it restarts."""


def advise(place: ServerAddress, memory: Reply) -> None:
    """Warn of a server that will fill up, or will use all memory of its machine."""
    facts = facts_of(memory)
    if facts.get("maxmemory") == "0":
        _log.warning("the server has no maxmemory and may take its whole machine", server=place)
    elif facts.get("maxmemory_policy") == "noeviction":
        _log.warning(
            "the server evicts nothing: when it is full it takes no more blocks until some expire",
            server=place,
            maxmemory=facts["maxmemory"],
        )


def check_alone(cluster: Reply) -> None:
    """Raise TierError for a node of a cluster: alone it has some of the slots only."""
    if facts_of(cluster).get("cluster_enabled") == "1":
        raise TierError("it is a node of a cluster: begin remote.url with redis+cluster://")


def free_bytes(memory: Reply) -> float | None:
    """Return how much more memory a server may use; None if it does not tell."""
    facts = facts_of(memory)
    try:
        most, used = int(facts["maxmemory"]), int(facts["used_memory"])
    except (KeyError, ValueError):
        return None
    return most - used if most else math.inf


def facts_of(reply: Reply) -> dict[str, str]:
    """Return the fields of a reply to INFO, by name."""
    text = reply.decode(errors="replace") if isinstance(reply, bytes) else ""
    return dict(line.partition(":")[::2] for line in text.splitlines() if ":" in line)
