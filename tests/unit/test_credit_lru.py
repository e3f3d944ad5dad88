from test_run_density import Tier

from kvtier.core.eviction.run_density import CreditLru


def test_the_least_recently_used_goes_first():
    tier = Tier(CreditLru)
    one, _ = tier.use(1, 2)
    two, _ = tier.use(7, 8, at=1)
    assert tier.victims() == [*one[::-1], *two[::-1]]


def test_a_block_seen_before_counts_as_used_five_minutes_later():
    tier = Tier(CreditLru)
    tier.use(1, 2)
    back, _ = tier.use(1, 2, at=10)
    soon, _ = tier.use(7, 8, at=300)
    late, _ = tier.use(5, 6, at=320)
    assert tier.victims() == [*soon[::-1], *back[::-1], *late[::-1]]


def test_a_ghost_that_comes_back_has_credit():
    tier = Tier(CreditLru)
    tier.use(1, 2)
    tier.evict(2)
    back, _ = tier.use(1, 2, at=10)
    new, _ = tier.use(7, 8, at=100)
    assert tier.victims() == [*new[::-1], *back[::-1]]
