"""A maximum age: what is older is not served, listed or taken over by a restart."""

from ssd_files import Opener, blocks_of, present

from kvtier.core.identity import unpack_headers
from kvtier.testing.tier_contract import fetch, store
from kvtier.tiers.base import MissReason
from kvtier.tiers.ssd.options import SsdOptions


class WallClock:
    """Seconds since 1970, which pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1_800_000_000

    def __call__(self) -> int:
        return self.now_s


def limited(clock: WallClock, max_age_s: int = 100) -> SsdOptions:
    return SsdOptions(max_age_s=max_age_s, now_s=clock)


def test_a_block_is_served_up_to_its_age_and_not_beyond(ssd: Opener) -> None:
    clock = WallClock()
    tier = ssd(options=limited(clock))
    old, young = blocks_of(range(2))
    store(tier, old)
    clock.now_s += 60
    store(tier, young)
    clock.now_s += 40
    assert fetch(tier, old, young) == [None, None]
    clock.now_s += 1
    assert present(tier, [old, young]) == [False, True]
    assert [header.block_hash for header in unpack_headers(tier.headers())] == [
        young.header.block_hash
    ]
    assert fetch(tier, old, young, old) == [MissReason.EXPIRED, None, MissReason.EXPIRED]
    assert fetch(tier, old) == [MissReason.ABSENT]
    assert tier.usage().num_blocks == 1


def test_an_expired_block_is_stored_anew_although_the_index_has_it(ssd: Opener) -> None:
    clock = WallClock()
    tier = ssd(options=limited(clock))
    block = blocks_of([1])[0]
    store(tier, block)
    clock.now_s += 101
    store(tier, block)
    clock.now_s += 99
    assert fetch(tier, block) == [None]
    tier.close()
    assert fetch(ssd(options=limited(clock)), block) == [None]


def test_a_restart_forgets_what_is_too_old_and_gives_its_space_back(ssd: Opener) -> None:
    clock = WallClock()
    tier = ssd(options=limited(clock))
    store(tier, *blocks_of(range(15)))  # one segment is full, one is appended to
    clock.now_s += 50
    store(tier, *blocks_of(range(15, 18)))
    tier.close()
    clock.now_s += 51
    tier = ssd(options=limited(clock))
    assert present(tier, blocks_of(range(18))) == [False] * 15 + [True] * 3
    assert len(ssd.segments()) == 1
    assert fetch(tier, *blocks_of(range(15, 18))) == [None] * 3


def test_without_a_limit_age_is_no_matter(ssd: Opener) -> None:
    clock = WallClock()
    tier = ssd(options=limited(clock, max_age_s=0))
    blocks = blocks_of(range(3))
    store(tier, *blocks)
    clock.now_s += 10**9
    assert fetch(tier, *blocks) == [None] * 3


def test_a_clock_set_back_keeps_blocks_and_one_set_forward_only_hides_them(ssd: Opener) -> None:
    clock = WallClock()
    tier = ssd(options=limited(clock))
    blocks = blocks_of(range(3))
    store(tier, *blocks)
    clock.now_s -= 10**9
    assert fetch(tier, *blocks) == [None] * 3
    tier.close()
    clock.now_s += 2 * 10**9
    tier = ssd(options=limited(clock))
    assert present(tier, blocks) == [False] * 3
    tier.close()


def test_a_clock_without_a_battery_starts_at_1970_and_blocks_count(ssd: Opener) -> None:
    clock = WallClock()
    clock.now_s = 0
    tier = ssd(options=limited(clock))
    blocks = blocks_of(range(15))
    store(tier, *blocks)
    tier.close()
    tier = ssd(options=limited(clock))
    assert fetch(tier, *blocks) == [None] * 15
