from test_run_density import Tier

from kvtier.core.eviction.s3_fifo import S3Fifo


def test_what_was_not_used_since_it_came_goes_first_in_first_out():
    tier = Tier(S3Fifo)
    rows = [tier.use(number, at=number)[0][0] for number in range(5)]
    assert tier.victims() == rows


def test_what_was_used_in_the_small_queue_stays_when_a_flood_comes():
    tier = Tier(S3Fifo)
    good, _ = tier.use(1, 2)
    tier.use(1, 2, at=5)
    flood = [tier.use(number, at=number)[0][0] for number in range(10, 30)]
    assert tier.evict(15) == flood[:15]
    assert not set(good) & set(tier.evict(1))


def test_a_ghost_begins_in_the_main_queue():
    tier = Tier(S3Fifo)
    tier.use(1)
    tier.evict(1)
    back, _ = tier.use(1, at=3)
    flood = [tier.use(number, at=number)[0][0] for number in range(10, 20)]
    order = tier.victims()
    # The small queue gives until it is a quarter of both; then the main one has its turn.
    assert order.index(back[0]) == len(flood)


def test_each_use_earns_one_more_round_in_the_main_queue_up_to_three():
    tier = Tier(S3Fifo)
    much, _ = tier.use(1)
    for at in range(1, 20):
        tier.use(1, at=at)
    once, _ = tier.use(2, at=30)
    tier.use(2, at=31)
    tier.victims()  # both are in the main queue from now on
    for at in range(40, 45):
        tier.use(1, at=at)
    assert tier.victims() == [*once, *much]
