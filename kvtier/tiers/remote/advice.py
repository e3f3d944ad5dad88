"""Advice: what an operator should know of a server's settings, once, in the log."""

import math

from kvtier.errors import TierError
from kvtier.observe.log import Log
from kvtier.tiers.remote.address import Place
from kvtier.tiers.remote.resp import Command, Reply

__all__ = ["IDENTITY", "MEMORY", "QUESTIONS", "advise", "check_alone", "facts_of", "free_bytes"]

_log = Log("kvtier.remote")

MEMORY = Command((b"INFO", b"memory"))
"""Asks how much memory a server uses and may use."""

QUESTIONS = (MEMORY, Command((b"INFO", b"cluster")))
"""What a server is asked at the first connection; a user may not be allowed to."""


IDENTITY = Command((b"INFO", b"server"))
"""What a server is asked at each connection: its ``run_id`` is another after a restart."""


def advise(place: Place, memory: Reply) -> None:
    """Warn of a server that will fill up, or take its whole machine."""
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
    """Return how much more a server takes before it is full; None where it does not tell."""
    facts = facts_of(memory)
    try:
        most, used = int(facts["maxmemory"]), int(facts["used_memory"])
    except (KeyError, ValueError):
        return None
    return most - used if most else math.inf


def facts_of(reply: Reply) -> dict[str, str]:
    """Return what an answer to INFO tells, by name."""
    text = reply.decode(errors="replace") if isinstance(reply, bytes) else ""
    return dict(line.partition(":")[::2] for line in text.splitlines() if ":" in line)
