"""Names of key spaces are kept beside the blocks that they name, also where these move."""

import asyncio
from types import SimpleNamespace

from kvtier.core.residency import TierName
from kvtier.daemon.persistence.key_spaces import FILE_NAME, SavedKeySpaces
from kvtier.errors import TierTimeout
from kvtier.tiers.host import HostArena
from tests.unit.test_liveness import SLAB_BYTES, driver_of


class HungExecutor:
    """The threads of a disk that does not answer, until one gives up on it."""

    def __init__(self):
        self.given_up = asyncio.Event()
        self.asked = asyncio.Event()

    async def run_in_background(self, _what, _call, _limit_ns):
        self.asked.set()
        await self.given_up.wait()
        raise TierTimeout("no answer")


def test_a_save_that_hangs_does_not_follow_to_the_next_disk(tmp_path):
    async def scenario():
        arena = HostArena(1, SLAB_BYTES)
        driver = driver_of(arena)
        old, new = tmp_path / "old", tmp_path / "new"
        old.mkdir()
        new.mkdir()
        spaces = SavedKeySpaces(driver, old)
        healthy, hung = driver.executors[TierName.SSD], HungExecutor()
        driver.executors[TierName.SSD] = hung
        layout = SimpleNamespace(block_tokens=64)
        spaces.registered(SimpleNamespace(key_space=bytes(16), engine="llama", layout=layout))
        await hung.asked.wait()
        await spaces.move_to(new)
        driver.executors[TierName.SSD] = healthy
        hung.given_up.set()
        await asyncio.wait_for(spaces._saving, 30)
        assert (new / FILE_NAME).exists()
        assert not (old / FILE_NAME).exists()
        driver.stop()
        arena.close()

    asyncio.run(scenario())
