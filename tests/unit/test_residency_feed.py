"""Feeds: a reader ends with what the index has, however slowly it reads and whatever happens."""

import asyncio
import contextlib
import random
import time

import numpy as np
import pytest
from dialogue import CPU, REMOTE, SSD, drop, empty_cpu, engine_on, open_harness
from prometheus_client import CollectorRegistry
from rows import SCOPE

from kvtier.core.admission import AdmitEverything
from kvtier.core.eviction.leaf_lru import LeafLru
from kvtier.core.identity import NO_TENANT, Selection, split_hashes
from kvtier.core.index import BlockIndex, NewBlocks, Scope
from kvtier.core.layout import KVLayout
from kvtier.core.limits import FEED_BLOCKS_MAX, FEED_ROWS_AT_ONCE
from kvtier.core.residency import LOWER_TIERS, Residency, TierName
from kvtier.node.messages import events as ev
from kvtier.node.node import Node, NodeSettings
from kvtier.node.operations import residency_feed as feed_module
from kvtier.node.operations.residency_feed import ResidencyFeeds
from kvtier.observe.daemon_metrics import DAEMON_METRICS
from kvtier.observe.metrics import Metrics
from kvtier.runtime.driver import Driver
from kvtier.testing.residency_model import ResidencyModel
from kvtier.tiers.host import HostArena

OTHERS = Scope(b"another space...", NO_TENANT)
SALTED = Scope(SCOPE.key_space, b"tenant number 1.")


def new_blocks(index, count, scope=SCOPE, seed=1):
    keys = np.random.default_rng(seed).integers(0, 2**63, (count, 2), dtype=np.uint64)
    return index.add(NewBlocks(keys, keys, 0, index.scope_id(scope), 5000))


def ready(index, tier, key_space=SCOPE.key_space):
    rows = index.selected(index.in_state(tier, Residency.READY), Selection(key_space))
    return set(split_hashes(index.keys_of(rows).tobytes()))


def read(feed, heard):
    while feed.has_news:
        heard(feed.take())


def feeds_on(index, is_up=lambda _tier: True):
    return ResidencyFeeds(index, is_up)


def opened(index, key_space=SCOPE.key_space, **more):
    feed = feeds_on(index, **more).open(key_space, lambda: None)
    return feed, ResidencyModel()


def check(index, heard):
    for tier in LOWER_TIERS:
        assert heard.blocks(tier) == ready(index, tier), tier


def test_a_reader_is_told_what_is_there_then_what_comes_and_leaves():
    index = BlockIndex()
    rows = new_blocks(index, 10)
    index.move(rows[:6], CPU, Residency.READY)
    index.move(rows[4:], SSD, Residency.WRITING)
    feed, heard = opened(index)
    read(feed, heard)
    assert (len(heard.blocks(CPU)), len(heard.blocks(SSD))) == (6, 0)
    index.move(rows[4:], SSD, Residency.READY)
    index.move(rows[0], CPU, Residency.EVICTING)
    index.move(rows[0], CPU, Residency.ABSENT)
    index.forget_absent(rows[:1])
    read(feed, heard)
    assert (len(heard.blocks(CPU)), len(heard.blocks(SSD))) == (5, 6)
    check(index, heard)
    assert heard.num_starts == 1


def test_others_key_spaces_are_none_of_its_business_and_tenants_are():
    index = BlockIndex()
    feed, heard = opened(index)
    read(feed, heard)
    scopes = enumerate((SCOPE, SALTED, OTHERS))
    three = [new_blocks(index, 4, scope, seed) for seed, scope in scopes]
    index.move(np.concatenate(three), CPU, Residency.READY)
    read(feed, heard)
    assert len(heard.blocks(CPU)) == 8
    late, heard_late = opened(index)
    read(late, heard_late)
    assert heard_late.blocks(CPU) == heard.blocks(CPU)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_while_it_reads_it_ends_with_what_is_there(seed, monkeypatch):
    monkeypatch.setattr(feed_module, "FEED_ROWS_AT_ONCE", 16)
    monkeypatch.setattr(feed_module, "FEED_BLOCKS_MAX", 60)
    rng = random.Random(seed)
    index = BlockIndex()
    new_blocks(index, 300, seed=seed)
    feed, heard = opened(index)
    for step in range(400):
        rows = index.rows()
        if not len(rows) or rng.random() < 0.1:
            scope = rng.choice([SCOPE, SALTED, OTHERS])
            rows = new_blocks(index, rng.randint(1, 20), scope, seed=1000 * seed + step)
        some = np.array(sorted(rng.sample(rows.tolist(), rng.randint(1, min(40, len(rows))))))
        index.move(some, rng.choice(LOWER_TIERS), rng.choice(list(Residency)))
        if rng.random() < 0.3:
            index.forget_absent(some)
        if rng.random() < 0.4:
            heard(feed.take())
    read(feed, heard)
    check(index, heard)


def test_a_slow_reader_costs_no_more_than_the_bound_and_misses_nothing():
    index = BlockIndex()
    feed, heard = opened(index)
    read(feed, heard)
    rows = new_blocks(index, FEED_BLOCKS_MAX + 1)
    index.move(rows, CPU, Residency.READY)  # more than may wait at once
    index.move(rows[:100], CPU, Residency.ABSENT)
    assert heard.num_starts == 1
    read(feed, heard)
    assert heard.num_starts == 2
    check(index, heard)
    for _ in range(3):  # each fits, and together they do not
        index.move(rows[: FEED_BLOCKS_MAX // 2], SSD, Residency.READY)
        index.move(rows[: FEED_BLOCKS_MAX // 2], SSD, Residency.ABSENT)
    read(feed, heard)
    check(index, heard)


def test_one_look_is_short_however_much_there_is():
    index = BlockIndex()
    rows = new_blocks(index, 5 * FEED_ROWS_AT_ONCE)
    index.move(rows, CPU, Residency.READY)
    feed, heard = opened(index)
    num_takes = 0
    while feed.has_news:
        changes = feed.take()
        assert sum(len(change.keys) for change in changes) <= FEED_ROWS_AT_ONCE
        heard(changes)
        num_takes += 1
    assert num_takes >= 5
    check(index, heard)


def test_where_nobody_watches_nobody_listens():
    index = BlockIndex()
    feeds = feeds_on(index)
    one, two = (feeds.open(SCOPE.key_space, lambda: None) for _ in range(2))
    assert index.listeners
    feeds.close(one)
    rows = new_blocks(index, 1)
    index.move(rows, CPU, Residency.READY)
    heard = ResidencyModel()
    read(two, heard)
    check(index, heard)
    feeds.close(two)
    assert not index.listeners


def test_who_listened_before_still_hears_all():
    index, told = BlockIndex(), []
    index.add_listener(lambda rows, *_: told.extend(rows.tolist()))
    feed, _ = opened(index)
    rows = new_blocks(index, 3)
    index.move(rows, CPU, Residency.READY)
    assert told == rows.tolist()
    assert feed.has_news


# On a node


def watched(harness, engine):
    return harness.node.feeds.open(engine.key_space, lambda: None), ResidencyModel()


def test_a_demotion_and_a_drop_are_told():
    harness = open_harness(SSD, REMOTE, slots=64)
    engine = engine_on(harness)
    feed, heard = watched(harness, engine)
    blocks = engine.chain(range(4))
    engine.store(blocks)
    harness.settle()
    read(feed, heard)
    assert [len(heard.blocks(tier)) for tier in (CPU, SSD, REMOTE)] == [4, 4, 4]
    empty_cpu(harness)
    read(feed, heard)
    assert [len(heard.blocks(tier)) for tier in (CPU, SSD, REMOTE)] == [0, 4, 4]
    drop(harness, CPU, SSD, REMOTE, selection=Selection(key_space=engine.key_space))
    harness.settle()
    read(feed, heard)
    assert [len(heard.blocks(tier)) for tier in (CPU, SSD, REMOTE)] == [0, 0, 0]
    assert heard.num_starts == 1


def test_a_tier_that_is_out_has_nothing_until_it_is_back():
    harness = open_harness(SSD, slots=64)
    engine = engine_on(harness)
    feed, heard = watched(harness, engine)
    engine.store(engine.chain(range(4)))
    harness.settle()
    harness.post(ev.TierUp(SSD, is_up=False))
    read(feed, heard)
    assert (len(heard.blocks(CPU)), len(heard.blocks(SSD))) == (4, 0)
    harness.post(ev.TierUp(SSD, is_up=True))
    read(feed, heard)
    assert (len(heard.blocks(CPU)), len(heard.blocks(SSD))) == (4, 4)


def test_what_a_tier_was_found_to_hold_is_told():
    harness = open_harness(SSD, slots=64)
    engine = engine_on(harness)
    engine.store(engine.chain(range(4)))
    harness.settle()
    after = open_harness(SSD, slots=64)
    feed, heard = watched(after, engine)
    read(feed, heard)
    after.recover(harness.tiers)
    read(feed, heard)
    assert (len(heard.blocks(CPU)), len(heard.blocks(SSD))) == (0, 4)


# Over a driver


def driver_on():
    """A driver, an engine's session, and the index that blocks move in."""
    settings = NodeSettings("boot", num_slabs=1, slab_bytes=65_536, lease_ns=10**9)
    metrics = Metrics(DAEMON_METRICS, CollectorRegistry())
    node = Node(settings, LeafLru(), AdmitEverything(), metrics)
    layout = KVLayout("paged", 1, 64, 5000, "float32", "test")
    node.handle(ev.Register(1, "ticket", SCOPE.key_space, layout, "engine", "shm", 1), 0)
    (session,) = node.sessions
    return Driver(node, HostArena(1, 65_536), {}), session, node.cache.index


async def heard_of(batches, heard, num_blocks):
    """Hear batches until so many blocks are known; returns how many it took."""
    num_batches = 0
    async for changes in batches:
        heard(changes)
        num_batches += 1
        if len(heard.blocks(CPU)) == num_blocks:
            return num_batches
    raise AssertionError("it ended before")


def in_time(work):
    asyncio.run(asyncio.wait_for(work, 60))


def test_what_happens_meanwhile_goes_in_one_batch_and_who_leaves_is_forgotten():
    async def watch():
        driver, session, index = driver_on()
        quiet, heard = index.listeners, ResidencyModel()
        async with contextlib.aclosing(driver.watch(session)) as batches:
            rows = new_blocks(index, 40)
            index.move(rows[:1], CPU, Residency.READY)
            await heard_of(batches, heard, 1)
            assert driver.is_watching(session)
            for row in rows[1:].tolist():
                index.move(row, CPU, Residency.READY)
            assert await heard_of(batches, heard, 40) == 1
        assert not driver.is_watching(session)
        assert index.listeners == quiet

    in_time(watch())


@pytest.mark.parametrize("how", ["the driver stops", "the session ends"])
def test_a_feed_ends_with_its_session_and_with_the_driver(how):
    async def watch():
        driver, session, index = driver_on()
        heard = ResidencyModel()
        rows = new_blocks(index, 2)
        async with contextlib.aclosing(driver.watch(session)) as batches:
            index.move(rows[:1], CPU, Residency.READY)
            await heard_of(batches, heard, 1)
            if how == "the driver stops":
                driver.end_orders()
            else:
                driver.post(ev.SessionEnded("ticket"))
                index.move(rows[1:], CPU, Residency.READY)
            assert [changes async for changes in batches] == []
        assert not driver.is_watching(session)

    in_time(watch())


def test_orders_go_to_who_attends_last_and_end_with_the_driver():
    async def attend():
        driver, session, _ = driver_on()
        first, second = driver.orders(session), driver.orders(session)
        hearing = asyncio.ensure_future(anext(first, None))
        await asyncio.sleep(0)
        again = asyncio.ensure_future(anext(second, None))
        assert await hearing is None, "another one has taken its place"
        driver.post(ev.Drop(1, (TierName.GPU,), time.monotonic_ns() + 10**10))
        assert await again == 1, "which has not gone with it"
        driver.end_orders()
        assert await anext(second, None) is None
        assert await anext(driver.orders(session), None) is None, "nor does another begin"

    in_time(attend())
