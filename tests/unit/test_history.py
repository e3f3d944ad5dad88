import random
from hashlib import blake2b
from itertools import permutations
from sys import getsizeof

import numpy as np
import pytest

from kvtier.core.fate import Fate
from kvtier.core.limits import AGED_RUNS_MAX, GHOST_NS
from kvtier.core.request import NO_TRAITS, RequestTraits
from kvtier.core.residency import TierName
from kvtier.core.reuse.history import History, TouchResult, Use
from kvtier.core.reuse.invariants import check_history, residents

CPU, SSD = TierName.CPU, TierName.SSD
S = 1_000_000_000


def key(*path):
    """Name a block by the path that leads to it."""
    return blake2b(repr(path).encode(), digest_size=16).digest()


def chain(*path):
    """Return the blocks on a path: chains that begin alike have their first blocks in common."""
    return [key(*path[: end + 1]) for end in range(len(path))]


def use(*path, traits=NO_TRAITS, **more):
    return Use(chain(*path), 1000, 512, traits=traits, **more)


def touch(history, *path, at=0, tier=None, **more):
    touched = history.touch(use(*path, **more), at * S)
    if tier:
        history.enter(tier, chain(*path))
    return touched


def evicted(history, count, tier=CPU, size=1000):
    """Let the next blocks leave, and return them."""
    gone = []
    for block in history.queues.victims(tier, size):
        history.leave(tier, [block], Fate.EVICTED)
        gone.append(block)
        if len(gone) == count:
            break
    check_history(history)
    return gone


# What is remembered


def test_each_request_is_another_turn_of_its_chain():
    history = History()
    assert touch(history, 1, 2) == TouchResult(0, 0, 0)
    assert touch(history, 1, 2, 3, at=60) == TouchResult(2, 1, 1)
    assert touch(history, 1, 2, 3, 4, at=99) == TouchResult(3, 2, 1)
    assert touch(history, 1, 2, 9, at=120) == TouchResult(2, 3, 3)
    assert history.num_remembered == 5


def test_behind_what_many_share_a_chain_is_new():
    history = History()
    for user in range(5):
        turn = touch(history, "system", f"user {user}", at=user).turn
    check_history(history)
    assert turn == 0
    assert touch(history, "system", "user 4", "more", at=9).turn == 1


def test_the_empty_chain_is_nothing():
    history = History()
    assert touch(history) == TouchResult(0, 0, 0)
    history.extend(use(), 5)
    assert history.num_remembered == 0


def test_ghosts_are_remembered_for_a_time():
    history = History()
    touch(history, 1, 2, 3)
    touch(history, 1, 2, 4, at=600)
    history.advance(GHOST_NS + 2 * S)
    assert history.num_remembered == 3
    history.advance(GHOST_NS + 700 * S)
    assert history.num_remembered == 0
    assert len(history.runs) == 0


def test_what_is_in_a_tier_is_not_forgotten_nor_what_it_hangs_on():
    history = History()
    touch(history, 1, 2, 3)
    history.enter(SSD, [key(1, 2)])
    history.advance(10 * GHOST_NS)
    assert history.num_remembered == 2
    history.leave(SSD, [key(1, 2)], Fate.EVICTED)
    history.advance(12 * GHOST_NS)
    check_history(history)
    assert history.num_remembered == 0


@pytest.mark.parametrize("num_held", [0, 1])
def test_ghosts_are_bounded_in_number(monkeypatch, num_held):
    monkeypatch.setattr("kvtier.core.reuse.run.GHOST_BLOCKS_MAX", 100)
    history = History()
    for user in range(300):
        touch(history, user, 1, 2, 3, 4, at=user)
        history.enter(CPU, chain(user)[:num_held])
        assert history.num_remembered - history.num_resident <= 105
    assert history.fates([key(299, 1)]) == [Fate.NEVER_STORED]


def test_why_a_block_is_not_there():
    history = History()
    touch(history, 1, 2, 3, tier=CPU)
    history.leave(CPU, [key(1, 2, 3)], Fate.EVICTED)
    history.note_fate([key(1, 2), key("unknown")], Fate.REFUSED_WORTH)
    assert history.fates([*chain(1, 2, 3), key("unknown")]) == [
        Fate.NEVER_STORED,
        Fate.REFUSED_WORTH,
        Fate.EVICTED,
        Fate.NEVER_STORED,
    ]


def test_generated_blocks_are_no_use_of_the_prompt():
    history = History()
    touch(history, 1, 2)
    history.extend(use(1, 2, 3, 4, 5, num_prompt_blocks=3), 9 * S)
    check_history(history)
    assert [history.times_seen(block) for block in chain(1, 2, 3, 4, 5)] == [1] * 5
    groups = {block: group_of(history, block).is_generated for block in chain(1, 2, 3, 4, 5)}
    assert list(groups.values()) == [False, False, False, True, True]
    assert touch(history, 1, 2, 3, 4, 5, 6, at=20) == TouchResult(5, 1, 1)


def test_what_was_stored_before_a_restart_counts_as_seen():
    history = History()
    assert history.touch(use(1, 2, 3), S, num_stored=2).num_known == 0
    assert [history.times_seen(block) for block in chain(1, 2, 3)] == [2, 2, 1]
    check_history(history)


def adopt(history, path, places, tier):
    """Bring blocks of a path into a tier without a request that names them."""
    keys = chain(*path)
    parents = [key("root"), *keys[:-1]]
    named = [keys[place] for place in places]
    history.adopt(named, [parents[place] for place in places], np.array(places), 1000)
    history.enter(tier, named)
    check_history(history)


def test_adopted_blocks_become_known_with_the_first_request_that_names_them():
    history = History()
    adopt(history, (1, 2), [1, 0], SSD)
    assert history.times_seen(key(1, 2)) == 1
    assert touch(history, 1, 2, 3, at=5) == TouchResult(2, 1, 1)
    assert [history.times_seen(block) for block in chain(1, 2, 3)] == [2, 2, 1]
    assert residents(history, SSD) == set(chain(1, 2))
    assert evicted(history, 2, SSD) == [key(1, 2), key(1)]


@pytest.mark.parametrize("order", [*permutations(range(4))])
def test_adopted_blocks_leave_tail_first_in_whatever_order_they_came(order):
    history = History()
    for place in order:
        adopt(history, (1, 2, 3, 4), [place], CPU)
    assert evicted(history, 4) == chain(1, 2, 3, 4)[::-1]


def test_an_orphaned_parent_is_found_by_a_request():
    history = History()
    adopt(history, (1, 2, 3, 4), [3, 2], CPU)
    assert history.needs_adoption(chain(1, 2, 3, 4)).tolist() == [True, True, False, False]
    touch(history, 1, 2, 3, 4, 5, tier=CPU)
    assert not history.needs_adoption(chain(1, 2, 3, 4)).any()
    assert evicted(history, 5) == chain(1, 2, 3, 4, 5)[::-1]


def test_an_orphaned_parent_is_forgotten_after_its_children():
    history = History()
    adopt(history, (1, 2, 3), [2], CPU)
    history.advance(10 * GHOST_NS)
    assert history.num_remembered == 2
    evicted(history, 1)
    history.advance(12 * GHOST_NS)
    assert history.num_remembered == 0


# Broken input


@pytest.mark.parametrize(
    "blocks",
    [
        [*chain(1, 2), *chain(1, 2)],
        [*chain(7, 8), key(1, 2)],
        [key(1, 2), key(1)],
        [key(1), key("new"), key(1, 2)],
        [key(1, 2)] * 3,
    ],
)
def test_a_chain_that_cannot_be_is_cut_and_others_stay_as_they_were(blocks):
    history = History()
    touch(history, 1, 2, 3, tier=CPU)
    history.touch(Use(blocks, 1000, 512), S)
    history.extend(Use(blocks, 1000, 512), S)
    check_history(history)
    assert touch(history, 1, 2, 3, at=3).num_known == 3


def test_a_block_with_an_impossible_place_has_no_parent():
    history = History()
    touch(history, 1, 2, 3, tier=CPU)
    stray = key("stray")
    history.adopt([stray], [key(1)], np.array([7]), 1000)
    history.adopt(chain(1, 2), [key(9), key(9)], np.array([5, 5]), 1000)
    check_history(history)
    assert history.needs_adoption([stray, *chain(1, 2)]).tolist() == [True, False, False]
    assert touch(history, 1, 2, 3, at=3).num_known == 3


def test_time_never_goes_back():
    history = History()
    touch(history, 1, 2, at=500)
    touch(history, 1, 2, at=3)
    history.advance(0)
    assert 0.0 < history.p_reuse([key(1, 2)])[0] < 1.0


def test_what_leaves_or_comes_twice_counts_once():
    history = History()
    touch(history, 1, 2, tier=CPU)
    history.enter(CPU, chain(1, 2) * 2)
    history.leave(CPU, chain(1, 2) * 2, Fate.EVICTED)
    history.leave(CPU, [key("unknown")], Fate.EVICTED)
    check_history(history)
    assert history.num_resident == 0


def test_a_leap_of_time_is_caught_up_with_in_steps():
    history = History()
    for user in range(AGED_RUNS_MAX):
        history.touch(use(user, 1), user)
    # Each run passes a dozen age bins on its way.
    for _ in range(15):
        before = sum(history.runs.bin)
        history.advance(600 * S)
        assert sum(history.runs.bin) - before <= AGED_RUNS_MAX
    assert set(history.runs.bin) == {15}


# What is learned


def group_of(history, block):
    run = int(history.blocks.run[history.blocks.row(block)])
    return history._hazards.groups[history.runs.group[run]]


def in_turns(requests, history):
    for at, path, traits in sorted(requests, key=lambda each: each[0]):
        history.touch(use(*path, traits=traits), round(at * S))


def talk(user, at, num_turns, traits=NO_TRAITS, num_blocks=1):
    """Return the requests of one conversation, a minute apart."""
    first = [f"u{user}", *["p"] * (num_blocks - 1)]
    return [(at + 60 * turn, [*first, *range(turn)], traits) for turn in range(num_turns)]


def test_what_comes_back_is_expected_to_come_back():
    history = History()
    requests = []
    for user in range(0, 600, 2):
        requests += talk(user, user * 3, 3)  # short ones come back
        requests += talk(user + 1, user * 3, 1, num_blocks=40)  # long ones do not
    in_turns(requests, history)
    in_turns([(2000, ["a"], NO_TRAITS), (2000, ["b", *["p"] * 39], NO_TRAITS)], history)
    short, long, unknown = history.p_reuse([key("a"), key("b"), key("unknown")])
    assert short > 0.8
    assert long < 0.3
    assert unknown == 0.0
    assert history.p_reuse([key("a")], within_s=1.0)[0] < 0.1
    short, long, unknown = history.queues.scores([key("a"), key("b"), key("unknown")])
    assert short > 3 * long > unknown == 0.0


@pytest.mark.parametrize("lie", [False, True])
def test_a_hint_is_worth_what_it_proved_to_be(lie):
    history = History()
    requests = []
    for user in range(400):
        comes_back = user % 2 == 0
        traits = RequestTraits(continues=float(comes_back ^ lie))
        requests += talk(user, user * 2, 2 if comes_back else 1, traits)
    in_turns(requests, history)
    back, gone = RequestTraits(continues=float(not lie)), RequestTraits(continues=float(lie))
    history.touch(use("a", traits=back), 900 * S)
    history.touch(use("b", traits=gone), 900 * S)
    score_back, score_gone = history.queues.scores([key("a"), key("b")])
    assert score_back > 2 * score_gone


@pytest.mark.slow
def test_what_is_learned_does_not_depend_on_what_there_is_room_for():
    tables = []
    for capacity in (10, 1000):
        history, draw = History(), random.Random(5)
        for at in range(600):
            path = [draw.randrange(40), *range(draw.randrange(4))]
            history.touch(use(*path), at * S)
            history.enter(CPU, chain(*path))
            if (surplus := history.num_resident - capacity) > 0:
                evicted(history, surplus)
        tables.append(history._hazards.table().tolist())
    assert tables[0] == tables[1]


@pytest.mark.slow
def test_the_same_requests_give_the_same_evictions():
    def run():
        history, draw, gone = History(), random.Random(7), []
        for at in range(300):
            path = [draw.randrange(30), *range(draw.randrange(5))]
            history.touch(use(*path), at * S)
            history.enter(CPU, chain(*path))
            gone += evicted(history, max(history.num_resident - 20, 0)) or []
        return gone

    assert run() == run() != []


def test_a_group_beyond_the_last_is_one_of_all_others(monkeypatch):
    monkeypatch.setattr("kvtier.core.reuse.hazard._GROUPS_MAX", 3)
    history = History()
    for user in range(20):
        touch(history, user, *["p"] * user, at=user)
        touch(history, user, *["p"] * user, "q", at=user + 1)
    assert len(history._hazards.groups) == 3


# What leaves first


def test_tails_go_before_heads_and_no_child_is_left_behind():
    history = History()
    touch(history, 1, 2, 3, 4, tier=CPU)
    touch(history, 1, 2, 8, 9, at=1, tier=CPU)
    gone = evicted(history, 7)
    assert sorted(gone) == sorted({*chain(1, 2, 3, 4), *chain(1, 2, 8, 9)})
    for path in (chain(1, 2, 3, 4), chain(1, 2, 8, 9)):
        assert [block for block in gone if block in path] == path[::-1]


def test_what_is_skipped_stays_with_all_it_hangs_on():
    history = History()
    touch(history, 1, 2, 3, tier=CPU)
    touch(history, 7, 8, at=1, tier=CPU)
    skipped = key(1, 2, 3)
    assert list(history.queues.victims(CPU, 1000, lambda block: block == skipped)) == [key(7, 8)]
    gone = []
    for block in history.queues.victims(CPU, 1000):
        if block != skipped:
            history.leave(CPU, [block], Fate.EVICTED)
            gone.append(block)
    assert gone == [key(7, 8), key(7)]
    assert evicted(history, 9) == list(reversed(chain(1, 2, 3)))


def test_tiers_and_sizes_have_orders_of_their_own():
    history = History()
    touch(history, 1, 2, tier=CPU)
    history.enter(SSD, chain(1))
    assert evicted(history, 9, SSD) == [key(1)]
    assert evicted(history, 9, CPU, size=9000) == []
    assert evicted(history, 9, CPU) == [key(1, 2), key(1)]


def test_deep_blocks_stay_longer_where_they_save_more():
    history = History(lambda end_tokens, block_tokens: block_tokens * (1 + end_tokens / 5_000))
    touch(history, 1, *["p"] * 40, tier=CPU)
    touch(history, 2, *["p"] * 40, tier=CPU, at=1)
    # Of one group and age, so that only the depth tells them apart.
    touch(history, 3, tier=CPU, at=1)
    scores = history.queues.scores([key(2, *["p"] * 40), key(3)])
    plain = History()
    touch(plain, 2, *["p"] * 40, tier=CPU)
    touch(plain, 3, tier=CPU)
    plain_scores = plain.queues.scores([key(2, *["p"] * 40), key(3)])
    assert scores[0] / scores[1] > 1.5 * plain_scores[0] / plain_scores[1]


def test_saved_seconds_that_are_not_known_yet_do_no_harm():
    history = History(lambda end_tokens, block_tokens: 0.0)
    touch(history, 1, 2, tier=CPU)
    assert evicted(history, 2) == [key(1, 2), key(1)]


def test_a_new_chain_that_is_worth_less_than_all_it_would_push_out_does_not_stay():
    history = History()
    requests = []
    for user in range(0, 400, 2):
        requests += talk(user, user * 3, 4)
        requests += talk(user + 1, user * 3, 1, num_blocks=40)
    in_turns(requests, history)
    for user in range(380, 400, 2):
        history.enter(CPU, [key(f"u{user}")])
    long, short = use("long", *["p"] * 39), use("short")
    history.touch(long, 1290 * S)
    history.touch(short, 1290 * S)
    assert history.queues.would_stay(long, 5, CPU) == 0
    assert history.queues.would_stay(short, 1, CPU) == 1
    assert history.queues.would_stay(long, 5, SSD) == 5  # which is empty
    check_history(history)


# What it costs


@pytest.mark.slow
def test_a_block_takes_at_most_200_bytes():
    """In chains of six, half of which came back: two runs a chain, and growth at its worst."""
    history, num_chains = History(), 1500
    for number in range(num_chains):
        own = [key(number, place) for place in range(6)]
        history.touch(Use(own, 1000, 512), number * 10_000_000)
        history.enter(CPU, own)
        history.touch(Use(own[:3], 1000, 512), number * 10_000_000)
    assert history.num_remembered == 6 * num_chains
    blocks, runs = history.blocks, history.runs
    table = blocks._table
    arrays = [blocks._facts, table.keys, table._buckets, table._free]
    num_bytes = sum(array.nbytes for array in arrays) + sum(map(getsizeof, runs._columns))
    tickets = [*history._ages, history._ghosts._waiting]
    tickets += history.queues.queue(0, 4096)._buckets.values()
    num_bytes += sum(getsizeof(queue) + 36 * len(queue) for queue in tickets)
    print(f"{num_bytes / history.num_remembered:.0f} bytes a block")
    assert num_bytes / history.num_remembered <= 200


@pytest.mark.slow
def test_what_is_remembered_is_bounded_however_long_it_goes_on():
    """Queues and buckets keep what does not count any more for a while, and not for ever."""
    history, draw = History(), random.Random(11)
    for at in range(1500):
        path = [draw.randrange(50), draw.randrange(3)]
        history.touch(use(*path), at * S * 3)
        history.enter(CPU, chain(*path))
        evicted_now = max(history.num_resident - 40, 0)
        for block, _ in zip(history.queues.victims(CPU, 1000), range(evicted_now), strict=False):
            history.leave(CPU, [block], Fate.EVICTED)
    check_history(history)
    num_entries = sum(map(len, history._ages)) + history._ghosts.num_waiting
    assert history.num_remembered <= 200
    assert len(history.runs) <= 200
    assert num_entries <= 4 * (GHOST_NS // (3 * S))  # what was begun within a ghost's time


def test_runs_may_leave_together_in_any_order():
    history = History()
    touch(history, 1, 2, 3, tier=CPU)
    touch(history, 7, 8, 9, tier=CPU)
    mixed = [each for pair in zip(chain(1, 2), chain(7, 8, 9), strict=False) for each in pair]
    history.leave(CPU, [*mixed, key(7, 8, 9), key(1, 2, 3)], Fate.DROPPED)
    check_history(history)
    assert not residents(history, CPU)
