"""The end of parts: none that goes wrong keeps the others open, or passes for closed."""

import asyncio
import threading

import pytest

from kvtier.config import Config
from kvtier.core.residency import TierName
from kvtier.daemon.closing import ClosingStack
from kvtier.daemon.stop import Stop
from kvtier.daemon.tiers.detach import close
from kvtier.daemon.tiers.opening import begin_opening, opened
from kvtier.tiers.breaker import BreakerTier
from kvtier.tiers.memory import MemoryTier


def test_a_part_that_breaks_or_is_cancelled_keeps_no_other_open() -> None:
    ended: list[str] = []

    async def wait_for_what_is_given_up() -> None:
        answer = asyncio.get_running_loop().create_future()
        answer.cancel()
        await answer

    def break_down() -> None:
        raise RuntimeError("can't start new thread")

    async def scenario() -> None:
        async with ClosingStack(Stop(60, end=lambda _code: None)) as closing:
            closing.add("the first one", lambda: ended.append("first"))
            closing.add("what breaks", break_down)
            closing.add("what waits in vain", wait_for_what_is_given_up)
            closing.add("the last one", lambda: ended.append("last"))

    asyncio.run(scenario())
    assert ended == ["last", "first"]


class Closed(MemoryTier):
    """A tier that tells whether it was closed, and of which a bug shows when it is touched."""

    is_closed = False

    def health_check(self, deadline_ns: int) -> None:
        raise ZeroDivisionError

    def close(self) -> None:
        self.is_closed = True


def test_a_tier_is_not_closed_where_no_thread_is_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def scenario() -> None:
        tier = Closed(1 << 20)
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", start)
            assert not await close(tier), "nobody else may have its medium yet"
        assert await close(tier)
        assert tier.is_closed

    asyncio.run(scenario())


def test_a_tier_of_which_a_bug_shows_as_it_comes_is_closed_again() -> None:
    tier = Closed(1 << 20, name=TierName.REMOTE)

    async def scenario() -> None:
        with pytest.raises(ZeroDivisionError):
            await opened(begin_opening(Config(), TierName.REMOTE, lambda *_: BreakerTier(tier)))

    asyncio.run(scenario())
    assert tier.is_closed
