"""Advice: what an operator should know of a server's settings, once, in the log."""

from kvtier.observe.log import Log
from kvtier.tiers.remote.address import Place
from kvtier.tiers.remote.resp import Command, Reply

__all__ = ["ASK_MEMORY", "advise"]

_log = Log("kvtier.remote")

ASK_MEMORY = Command((b"INFO", b"memory"))
"""What ``advise`` wants the reply to; a user may not be allowed to ask."""


def advise(place: Place, reply: Reply) -> None:
    """Warn of a server that will fill up, or take its whole machine."""
    text = reply.decode(errors="replace") if isinstance(reply, bytes) else ""
    facts = dict(line.partition(":")[::2] for line in text.splitlines() if ":" in line)
    if facts.get("maxmemory") == "0":
        _log.warning("the server has no maxmemory and may take its whole machine", server=place)
    elif facts.get("maxmemory_policy") == "noeviction":
        _log.warning(
            "the server evicts nothing: when it is full it takes no more blocks until some expire",
            server=place,
            maxmemory=facts["maxmemory"],
        )
