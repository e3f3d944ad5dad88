"""Who is let in: everything there is room for, or what is expected to save more than it costs."""

import hashlib

import pytest

from kvtier.core.admission import (
    Admit,
    AdmitByWorth,
    AdmitEverything,
    Offer,
    OfferReason,
    QuantileGate,
    RefusalRule,
    Reject,
    Throttle,
)
from kvtier.core.plan import PlannerSettings, TransferSample
from kvtier.core.planner import Planner
from kvtier.core.request import RequestTraits
from kvtier.core.residency import TierName
from kvtier.core.reuse.history import History, Use

SECOND = 1_000_000_000
BLOCK_BYTES = 1 << 20
TOKENS = 64


def decide(num_blocks: int, queued_bytes: int):
    return AdmitEverything().decide(
        Offer(TierName.SSD, num_blocks, 0, 100, queued_bytes, queued_bytes_max=1000)
    )


def test_all_is_admitted_where_there_is_room():
    assert decide(10, 0) == Admit(10)


def test_as_many_as_there_is_room_for():
    assert decide(10, 750) == Admit(2)


def test_a_full_queue_throttles():
    assert decide(1, 950) == Throttle("queue_full")
    assert decide(1, 1000) == Throttle("queue_full")


def keys(first, num_blocks):
    numbers = range(first, first + num_blocks)
    return [hashlib.sha256(number.to_bytes(8)).digest()[:16] for number in numbers]


def use(first, num_blocks, name=""):
    return Use(keys(first, num_blocks), BLOCK_BYTES, TOKENS, traits=RequestTraits(request_id=name))


class World:
    """A history and a planner that have seen something, and the admission over them."""

    def __init__(self, gate=None, *, is_ranked=True):
        self.history = History()
        self.planner = Planner(PlannerSettings())
        gates = {TierName.SSD: gate} if gate else {}
        self.admission = AdmitByWorth(self.history, self.planner, gates, is_ranked=is_ranked)
        self.now_ns = 0

    def live(self, num_requests=400, each_s=20):
        """Half of the requests come back all the time, the others never."""
        for number in range(num_requests):
            self.now_ns += each_s * SECOND
            self.history.advance(self.now_ns)
            chain = use(0, 8) if number % 2 else use(1000 + 100 * number, 40)
            self.history.touch(chain, self.now_ns)
        self.history.touch(use(0, 8), self.now_ns)

    def read(self, seconds, num_samples=200):
        """Have the SSD take so long for eight blocks."""
        for number in range(num_samples):
            self.planner.note_transfer(
                TierName.SSD,
                True,
                TransferSample(8, 8 * BLOCK_BYTES, 1, seconds),
                self.now_ns + number * SECOND,
            )

    def decide(self, first, num_blocks=8, **more):
        return self.admission.decide(
            Offer(
                tier=TierName.SSD,
                num_blocks=num_blocks,
                first_position=0,
                payload_bytes=BLOCK_BYTES,
                queued_bytes=0,
                queued_bytes_max=1 << 40,
                reason=more.pop("reason", OfferReason.LEAVING),
                keys=keys(first, num_blocks),
                block_tokens=TOKENS,
                key_space=b"space",
                **more,
            )
        )

    def store(self, chain, num_spare=0, queued_bytes_max=1 << 40, is_way_down=False):
        return self.admission.decide(
            Offer(
                tier=TierName.CPU,
                num_blocks=len(chain.keys),
                first_position=0,
                payload_bytes=BLOCK_BYTES,
                queued_bytes=0,
                queued_bytes_max=queued_bytes_max,
                use=chain,
                num_spare=num_spare,
                is_way_down=is_way_down,
            )
        )


@pytest.mark.slow
def test_what_comes_back_is_written_and_what_never_does_is_not():
    world = World()
    world.live()
    assert world.decide(0) == Admit(8)
    assert world.decide(1000 + 100 * 398) == Reject(RefusalRule.WORTH)


def test_what_is_not_remembered_is_not_written():
    assert World().decide(0) == Reject(RefusalRule.WORTH)


@pytest.mark.slow
def test_a_tier_far_slower_than_computing_gets_nothing():
    world = World()
    world.live()
    world.read(1000.0)
    assert world.decide(0) == Reject(RefusalRule.WORTH)


def test_a_needed_parent_is_written_whatever_it_is_worth():
    world = World(QuantileGate(0.0))
    assert world.decide(0, 1, is_needed=True) == Admit(1)


@pytest.mark.slow
def test_a_parent_of_what_the_tier_has_is_needed():
    world = World(QuantileGate(0.0))
    world.live()
    world.history.enter(TierName.SSD, keys(5, 1))
    assert world.decide(4, 1) == Admit(1)
    assert world.decide(2, 1) == Reject(RefusalRule.BUDGET)


@pytest.mark.slow
def test_a_shut_gate_refuses_by_its_budget():
    gate = QuantileGate(0.0)
    world = World(gate)
    world.live()
    assert world.decide(0) == Reject(RefusalRule.BUDGET)
    assert gate.num_offered == 1


@pytest.mark.slow
@pytest.mark.parametrize("reason", [OfferReason.LINGERING, OfferReason.CLOSING])
def test_a_gate_is_moved_by_what_has_to_go_alone(reason):
    gate = QuantileGate(0.5)
    world = World(gate)
    world.live()
    assert world.decide(0, reason=reason) == Admit(8)
    assert gate.num_offered == 0


@pytest.mark.parametrize("reason", [OfferReason.STORED, OfferReason.USED])
def test_what_is_written_by_configuration_is_not_weighed(reason):
    assert World(QuantileGate(0.0)).decide(0, reason=reason) == Admit(8)


@pytest.mark.slow
def test_an_allowance_for_a_tier_without_a_gate_changes_nothing():
    world = World()
    world.admission.note_allowance(TierName.SSD, 1.0)
    world.live()
    assert world.decide(0) == Admit(8)


@pytest.mark.slow
def test_the_cpu_tier_takes_all_that_pushes_nothing_out():
    world = World()
    world.live()
    assert world.store(use(10**6, 20), num_spare=20) == Admit(20)
    assert world.store(use(10**6, 20), num_spare=20, queued_bytes_max=5 * BLOCK_BYTES) == Admit(5)


@pytest.mark.slow
def test_a_new_chain_loses_at_once_to_what_is_worth_more():
    world = World()
    world.live()
    good = use(0, 8)
    world.history.enter(TierName.CPU, good.keys)
    poor = use(10**6, 40)
    world.history.touch(poor, world.now_ns)
    assert world.store(poor) == Reject(RefusalRule.WORTH)
    assert world.store(poor, num_spare=3) == Admit(3, RefusalRule.WORTH)
    assert World(is_ranked=False).store(poor) == Admit(40)
    assert world.store(poor, is_way_down=True) == Admit(40), "the gate below may see it otherwise"
