"""What routers are told is what can be loaded: once each, parents first, and nothing for ever."""

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier.connectors.kit.chains import RankChains
from kvtier.connectors.kit.residency import TIER_BIT, BlockResidency
from kvtier.connectors.vllm.router_feed import (
    CPU,
    MEDIA,
    STORAGE,
    BlockNames,
    RouterFeed,
    RouterUpdate,
)
from kvtier.core.identity import NO_TENANT
from kvtier.core.residency import LOWER_TIERS, TierName
from kvtier.core.residency_change import RESYNC, ResidencyChange
from kvtier.core.table import as_keys
from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode
from tests.vllm.small_vllm import BLOCK_TOKENS, SmallVllm
from tests.vllm.small_vllm import RATIO as SMALL_RATIO

SPACES = [b"rank zero.......", b"rank one........"]
RATIO = 2


def describe(request: Any, first: int, end: int) -> list[BlockNames]:
    """Name vLLM's blocks by the tokens up to their end, as its hashes do."""
    tokens = request.tokens
    return [
        BlockNames(
            names=(tuple(tokens[: 2 * index + 1]), tuple(tokens[: 2 * index + 2])),
            parent_name=tuple(tokens[: 2 * index]) if index else None,
            token_ids=np.array(tokens[2 * index : 2 * index + 2], np.uint32),
        )
        for index in range(first, min(end, request.num_named))
    ]


def asked(*tokens: int, spaces: list[bytes] = SPACES[:1], num_named: int = 1000) -> Any:
    chains = RankChains(spaces, NO_TENANT, RATIO)
    chains.extend(tokens)
    request = SimpleNamespace(tokens=tokens, num_named=num_named)
    return SimpleNamespace(request=request, chains=chains, num_followed=0)


def change(tier: TierName, keys: Any, *, is_there: bool = True) -> ResidencyChange:
    return ResidencyChange(tier, is_there, as_keys(b"".join(keys)))


class Router:
    """Counts what it is told, as routers do, and finds fault with it."""

    def __init__(self) -> None:
        self.has: Counter[tuple[int, Any]] = Counter()

    def listener(self, told: RouterUpdate) -> None:
        for medium, names in told.withdrawn.items():
            for name in names:
                self.has[medium, name] -= 1
                assert self.has[medium, name] >= 0, "announced before"
        for medium, run in told.announced:
            before = run[0].facts.parent_name
            for block in run:
                assert block.facts.parent_name == before, "a run is a chain"
                before = block.facts.names[-1]
                for name in block.facts.names:
                    self.has[medium, name] += 1
                # Two blocks that part inside of them have all names but the last in common.
                assert self.has[medium, before] == 1, "announced once"

    def names(self, medium: int) -> set[Any]:
        return {name for (each, name), count in self.has.items() if count and each == medium}


def names_of(tracked: Any, num_blocks: int | None = None) -> set[Any]:
    tokens = tracked.request.tokens
    end = len(tokens) if num_blocks is None else num_blocks * RATIO
    return {tuple(tokens[:place]) for place in range(1, end + 1)}


def published(router_feed: RouterFeed) -> Router:
    router = Router()
    router.listener(router_feed.take(1000))
    assert not router_feed.is_waiting
    return router


def open_news(num_ranks: int = 1, blocks_max: int = 1000) -> RouterFeed:
    return RouterFeed(describe, num_ranks, blocks_max=blocks_max)


def test_what_waits_can_be_given_up_and_comes_again_with_the_next_request():
    router_feed, tracked = open_news(2), asked(1, 2, 3, 4, spaces=SPACES)
    for rank, hashes in enumerate(tracked.chains.first(2)):
        router_feed.listener(rank)([RESYNC, change(TierName.CPU, hashes)])
    router_feed.follow(tracked)
    assert router_feed.is_waiting
    router_feed.restart()
    assert not router_feed.is_waiting
    router_feed.follow(asked(1, 2, 3, 4, spaces=SPACES))
    assert published(router_feed).names(CPU) == names_of(tracked)


def test_a_chain_is_one_run_in_each_medium():
    router_feed, tracked = open_news(), asked(1, 2, 3, 4, 5, 6)
    router_feed.follow(tracked)
    (hashes,) = tracked.chains.first(3)
    router_feed.listener()([RESYNC, change(TierName.CPU, hashes), change(TierName.SSD, hashes)])
    told = router_feed.take(1000)
    assert [(medium, len(run)) for medium, run in told.announced] == [(CPU, 3), (STORAGE, 3)]
    assert not told.withdrawn


def test_what_others_stored_is_told_once_a_request_has_met_it():
    router_feed, tracked = open_news(), asked(1, 2, 3, 4)
    (hashes,) = tracked.chains.first(2)
    router_feed.listener()([RESYNC, change(TierName.SSD, hashes)])
    assert not router_feed.take(1000).announced
    router_feed.follow(tracked)
    assert published(router_feed).names(STORAGE) == names_of(tracked)


def test_storage_has_a_block_until_the_last_tier_of_it_has_it_no_more():
    router_feed, tracked, router = open_news(), asked(1, 2), Router()
    router_feed.follow(tracked)
    (hashes,) = tracked.chains.first(1)
    steps = [
        (TierName.CPU, True, {CPU}),
        (TierName.SSD, True, {CPU, STORAGE}),
        (TierName.REMOTE, True, {CPU, STORAGE}),
        (TierName.CPU, False, {STORAGE}),
        (TierName.SSD, False, {STORAGE}),
        (TierName.REMOTE, False, set()),
    ]
    for tier, is_there, media in steps:
        router_feed.listener()([change(tier, hashes, is_there=is_there)])
        router.listener(router_feed.take(1000))
        assert {each for each in MEDIA if router.names(each)} == media


def test_a_block_is_told_while_every_rank_has_it():
    router_feed, tracked, router = open_news(2), asked(1, 2, spaces=SPACES), Router()
    router_feed.follow(tracked)
    first, second = tracked.chains.first(1)
    for rank, keys, is_there, names in (
        (0, first, True, set()),
        (1, second, True, names_of(tracked)),
        (1, second, False, set()),
        (1, second, True, names_of(tracked)),
        (0, first, False, set()),
    ):
        router_feed.listener(rank)([change(TierName.CPU, keys, is_there=is_there)])
        router.listener(router_feed.take(1000))
        assert router.names(CPU) == names


def test_several_changes_between_two_steps_are_one_or_none():
    router_feed, tracked = open_news(), asked(1, 2, 3, 4)
    router_feed.follow(tracked)
    (hashes,) = tracked.chains.first(2)
    come, go = (change(TierName.CPU, hashes, is_there=there) for there in (True, False))
    router_feed.listener()([come, go])
    assert router_feed.take(1000) == RouterUpdate()
    router_feed.listener()([come, go, come])
    assert len(router_feed.take(1000).announced) == 1


def test_a_daemon_that_is_gone_has_nothing():
    router_feed, tracked, router = open_news(), asked(1, 2, 3, 4), Router()
    router_feed.follow(tracked)
    (hashes,) = tracked.chains.first(2)
    for _ in range(2):
        router_feed.listener()([RESYNC, change(TierName.SSD, hashes)])
        router.listener(router_feed.take(1000))
        assert router.names(STORAGE) == names_of(tracked)
        router_feed.listener()([RESYNC])
        router.listener(router_feed.take(1000))
        assert not router.names(STORAGE)


def test_after_vllm_has_said_that_all_is_gone_it_is_told_again():
    router_feed, tracked, router = open_news(), asked(1, 2, 3, 4), Router()
    router_feed.follow(tracked)
    (hashes,) = tracked.chains.first(2)
    router_feed.listener()([change(TierName.CPU, hashes)])
    router.listener(router_feed.take(1000))
    router_feed.reannounce()
    told = router_feed.take(1000)
    assert set(told.withdrawn[CPU]) == names_of(tracked)
    router.listener(told)
    assert router.names(CPU) == names_of(tracked)


def test_what_is_forgotten_is_withdrawn():
    router_feed, router = open_news(blocks_max=3), Router()
    old, new = asked(1, 2, 3, 4), asked(5, 6, 7, 8)
    for tracked in (old, new):
        router_feed.follow(tracked)
        router_feed.listener()([change(TierName.CPU, tracked.chains.first(2)[0])])
        router.listener(router_feed.take(1000))
    # What remains of the old chain is its beginning.
    assert router.names(CPU) == names_of(new) | names_of(old, 1)


def test_a_running_request_is_not_forgotten_from_its_root():
    router_feed, router = open_news(blocks_max=8), Router()
    running = asked(*range(8))
    for num_named in range(1, 5):
        running.request.num_named = num_named
        router_feed.follow(running)
        passing = asked(*range(100 * num_named, 100 * num_named + 8))
        for tracked in (running, passing):
            router_feed.follow(tracked)
            router_feed.listener()([change(TierName.CPU, tracked.chains.first(4)[0])])
        router.listener(router_feed.take(1000))
        assert names_of(running, num_named) <= router.names(CPU)
    assert len(router.names(CPU)) == 8 * RATIO


def test_a_chain_longer_than_what_is_remembered_is_told_as_far_as_it_goes():
    router_feed, tracked, router = open_news(blocks_max=3), asked(*range(12)), Router()
    router_feed.listener()([change(TierName.CPU, tracked.chains.first(6)[0])])
    for num_named in range(1, 7):
        tracked.request.num_named = num_named
        router_feed.follow(tracked)
        router.listener(router_feed.take(1000))
        assert router.names(CPU) == names_of(tracked, min(num_named, 3))


def test_what_is_met_again_before_it_was_withdrawn_stays():
    router_feed, router = open_news(blocks_max=2), Router()
    old, new = asked(1, 2, 3, 4), asked(5, 6, 7, 8)
    for tracked in (old, new):
        router_feed.listener()([change(TierName.CPU, tracked.chains.first(2)[0])])
    router_feed.follow(old)
    router.listener(router_feed.take(1000))
    router_feed.follow(new)
    old.num_followed = 0
    router_feed.follow(old)
    assert router_feed.take(1000) == RouterUpdate()
    assert router.names(CPU) == names_of(old)


def test_blocks_that_vllm_has_no_name_for_are_told_once_it_has():
    router_feed, tracked, router = open_news(), asked(1, 2, 3, 4, num_named=1), Router()
    router_feed.follow(tracked)
    router_feed.listener()([change(TierName.CPU, tracked.chains.first(2)[0])])
    router.listener(router_feed.take(1000))
    assert router.names(CPU) == names_of(tracked, 1)
    tracked.request.num_named = 2
    router_feed.follow(tracked)
    router.listener(router_feed.take(1000))
    assert router.names(CPU) == names_of(tracked)


def test_a_step_publishes_no_more_than_it_is_to():
    router_feed, tracked, router = open_news(), asked(*range(200)), Router()
    router_feed.follow(tracked)
    router_feed.listener()([change(TierName.CPU, tracked.chains.first(100)[0])])
    num_takes = 0
    while router_feed.is_waiting:
        told = router_feed.take(16)
        assert sum(len(run) for _, run in told.announced) <= 16
        router.listener(told)
        num_takes += 1
    assert num_takes == 7
    assert router.names(CPU) == names_of(tracked)


def test_parents_are_told_first_whatever_came_first():
    router_feed, router, rng = open_news(), Router(), random.Random(1)
    requests = [asked(number, *range(1, 60)) for number in range(10)]
    for tracked in requests:
        router_feed.follow(tracked)
    keys = [key for tracked in requests for key in tracked.chains.first(30)[0]]
    rng.shuffle(keys)
    for key in keys:
        router_feed.listener()([change(TierName.SSD, [key])])
    while router_feed.is_waiting:
        told = router_feed.take(7)
        for medium, run in told.announced:
            parent = run[0].facts.parent_name
            assert parent is None or router.has[medium, parent], "its parent is known"
            router.listener(RouterUpdate(announced=[(medium, run)]))
    assert router.names(STORAGE) == set().union(*map(names_of, requests))


def test_a_step_withdraws_no_more_than_it_is_to():
    router_feed, router = open_news(blocks_max=100), Router()
    old, new = asked(*range(200)), asked(*range(300, 500))
    for tracked in (old, new):
        router_feed.listener()([change(TierName.CPU, tracked.chains.first(100)[0])])

    def drain() -> None:
        while router_feed.is_waiting:
            told = router_feed.take(16)
            assert len(told.withdrawn.get(CPU, ())) <= 2 * 16 * RATIO
            router.listener(told)

    router_feed.follow(old)
    drain()
    router_feed.reannounce()
    drain()
    assert router.names(CPU) == names_of(old)
    router_feed.follow(new)
    drain()
    assert router.names(CPU) == names_of(new)
    router_feed.listener()([RESYNC])
    drain()
    assert not router.names(CPU)


def test_what_is_to_be_withdrawn_does_not_pile_up():
    router_feed, router = open_news(blocks_max=4), Router()
    for number in range(50):
        tracked = asked(*range(100 * number, 100 * number + 8))
        router_feed.listener()([change(TierName.CPU, tracked.chains.first(4)[0])])
        router_feed.follow(tracked)
        for _ in range(number % 3):
            router.listener(router_feed.take(3))
        assert len(router.names(CPU)) <= (4 + 3) * RATIO


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_a_router_ends_with_what_can_be_loaded(seed: int) -> None:
    rng = random.Random(seed)
    num_ranks, blocks_max = rng.choice([1, 2]), rng.choice([6, 100])
    router_feed, router = open_news(num_ranks, blocks_max), Router()
    spaces = SPACES[:num_ranks]
    requests = [
        asked(*(rng.randint(0, 1) for _ in range(rng.randint(2, 12))), spaces=spaces)
        for _ in range(12)
    ]
    truth: list[dict[bytes, set[TierName]]] = [{} for _ in spaces]
    met: list[Any] = []
    for _ in range(300):
        tracked, rank = rng.choice(requests), rng.randrange(num_ranks)
        chain = tracked.chains.first(100)[rank]
        match rng.randrange(8):
            case 0:
                tracked.num_followed = 0
                router_feed.follow(tracked)
                met.append(tracked)
            case 1:
                router.listener(router_feed.take(rng.choice([1, 5, 1000])))
            case 2 if rng.random() < 0.1:
                router_feed.listener(rank)([RESYNC])
                truth[rank].clear()
            case 3 if rng.random() < 0.2:
                router_feed.reannounce()
            case _:
                keys = rng.sample(chain, rng.randint(1, len(chain)))
                tier, is_there = rng.choice(LOWER_TIERS), rng.random() < 0.6
                router_feed.listener(rank)([change(tier, keys, is_there=is_there)])
                for key in keys:
                    tiers = truth[rank].setdefault(key, set())
                    tiers.add(tier) if is_there else tiers.discard(tier)
    while router_feed.is_waiting:
        router.listener(router_feed.take(5))
    wanted: Counter[tuple[int, Any]] = Counter()
    seen: set[bytes] = set()
    for tracked in met:
        for index, facts in enumerate(describe(tracked.request, 0, len(tracked.chains))):
            keys = [chain[index] for chain in tracked.chains.first(100)]
            if keys[0] in seen:
                continue
            seen.add(keys[0])
            tiers = [truth[rank].get(key, set()) for rank, key in enumerate(keys)]
            if all(TierName.CPU in each for each in tiers):
                wanted.update((CPU, name) for name in facts.names)
            if all(each & {TierName.SSD, TierName.REMOTE} for each in tiers):
                wanted.update((STORAGE, name) for name in facts.names)
    assert router.has <= wanted
    assert router.has.total() <= len(MEDIA) * RATIO * blocks_max
    if blocks_max == 100:
        assert router.has == wanted


def test_residence_forgets_what_no_tier_has():
    residency = BlockResidency()
    keys = np.random.default_rng(1).integers(0, 2**63, (5000, 2), dtype=np.uint64)
    for tier in LOWER_TIERS:
        residency.note(keys, tier, is_there=True)
    assert set(residency.bits(keys).tolist()) == {sum(TIER_BIT.values())}
    for tier in LOWER_TIERS:
        residency.note(keys[::-1], tier, is_there=False)
    assert len(residency) == 0
    residency.note(keys[:7], TierName.SSD, is_there=True)
    assert residency.bits(keys).tolist() == [TIER_BIT[TierName.SSD]] * 7 + [0] * 4993


# With a daemon

TOKENS = list(range(1000, 1300))
NUM_FULL = len(TOKENS) // (SMALL_RATIO * BLOCK_TOKENS)


def name_blocks(request: Any, first: int, end: int) -> list[BlockNames]:
    size, tokens = SMALL_RATIO * BLOCK_TOKENS, request.all_token_ids
    return [
        BlockNames(
            names=(tuple(tokens[: at + size]),),
            parent_name=tuple(tokens[:at]) or None,
            token_ids=np.array(tokens[at : at + size], np.uint32),
        )
        for at in range(first * size, end * size, size)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_router_follows_what_a_daemon_stores_demotes_and_loses(num_ranks: int) -> None:
    router_feed, router = RouterFeed(name_blocks, num_ranks, blocks_max=1000), Router()

    def await_media(*media: int) -> None:
        def look() -> bool:
            router.listener(router_feed.take(1000))
            has = {medium for medium in MEDIA if len(router.names(medium)) == NUM_FULL}
            return has == set(media) and len(router.names(CPU) | router.names(STORAGE)) in {
                0,
                NUM_FULL,
            }

        await_true(look, f"the blocks are told to be in {media}")

    with work_directory() as directory:
        node = RunningNode(directory)
        daemon = node.daemon()
        with SmallVllm(node.socket, num_ranks=num_ranks, router_feed=router_feed) as small:
            small.prefill(TOKENS, list(range(1, 20)))
            await_media(CPU, STORAGE)
            node.await_idle()
            node.drop("cpu")
            await_media(STORAGE)
            daemon.kill()
            await_media()
            with node.daemon():
                await_media(STORAGE)
                assert small.prefill(TOKENS, list(range(21, 40)))[0] == 256
                await_media(CPU, STORAGE)
                node.await_idle()
                small.scheduler.reset()
                await_media()
