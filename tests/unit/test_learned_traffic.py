"""What was learned of traffic goes on after a restart, and what is not such is left alone."""

import json
from hashlib import blake2b

import pytest

from kvtier.core.admission import AdmitByWorth, QuantileGate
from kvtier.core.plan import PlannerSettings
from kvtier.core.planner import Planner
from kvtier.core.request import RequestTraits
from kvtier.core.residency import TierName
from kvtier.core.reuse.depth import DepthCurves
from kvtier.core.reuse.hazard import NUM_BINS, Group, Hazards
from kvtier.core.reuse.history import History, Use
from kvtier.core.reuse.use import TenantHints
from kvtier.node.state.decision_log import DecisionLog

S = 1_000_000_000
FINAL, GOES_ON = RequestTraits(continues=0.0), RequestTraits(continues=1.0)
HONEST, LIAR = b"a tenant: honest", b"a tenant, a liar"


def key(*path):
    return blake2b(repr(path).encode(), digest_size=16).digest()


def use(*path, tenant=bytes(16), traits=GOES_ON):
    keys = [key(tenant, *path[: end + 1]) for end in range(len(path))]
    return Use(keys, 1000, 512, tenant, traits)


def kept(learner):
    """Return what a learner keeps, as it comes out of a file."""
    return json.loads(json.dumps(learner.document()))


def chat(history, number, at, *, comes_back, **more):
    """Let a chain of its own come, and a minute later perhaps its next turn."""
    history.touch(use(number, number, **more), at * S)
    if comes_back:
        history.touch(use(number, number, 0, **more), (at + 60) * S)


def chance(history, at, **more):
    """Return what the history expects of a chain that comes now."""
    fresh = use((at, repr(more)), "new", **more)
    history.touch(fresh, at * S)
    return history.p_reuse(fresh.keys)[0]


def taught():
    history = History()
    for number in range(200):
        comes_back = number % 2 == 0
        traits = GOES_ON if comes_back else FINAL
        chat(history, number, 100 * number, comes_back=comes_back, traits=traits)
    return history


def test_classes_of_traffic_are_known_after_a_restart():
    before = taught()
    after = History()
    assert after.recall(kept(before)) == ""
    for traits in (GOES_ON, FINAL):
        known = chance(before, 30_000, traits=traits)
        assert chance(after, 1, traits=traits) == pytest.approx(known, abs=0.05)
    assert chance(after, 2) > 3 * chance(after, 2, traits=FINAL)


def test_what_is_kept_is_small_and_names_no_tenant():
    hazards = Hazards()
    for number in range(300):
        tenant = LIAR if number % 2 else b""
        sort = Group(number % 3, number % 60, number % 4, is_shared=False, tenant=tenant)
        hazards.expose(hazards.number(sort), 0, 5e5 if number == 8 else 5.0 + number)
    document = hazards.document()
    assert len(document["groups"]) == 30
    assert len(json.dumps(document)) < 12 << 10
    assert all(length % 2 == 0 for _, length, *_ in document["groups"])
    again = Hazards()
    again.recall(document)
    assert sorted(again.document()["groups"]) == sorted(document["groups"])


@pytest.mark.parametrize(
    "change",
    [
        {"groups": None},
        {"groups": [7]},
        {"groups": [[0, 1, 0, 0, 0, 0, "nothing"]]},
        {"groups": [[0, 1, 0, 0, 0, 0, "AAAA"]]},
        {"groups": [[0, 1, 0, 0, 0, 99, "A" * 128]]},
        {"groups": [[0, 1.5, 0, 0, 0, 0, "A" * 128]]},
        {"groups": [[0, 1, 0, 0, 0, 0, "/3/" + "A" * 125]]},
        {"groups": [[0, 1, 0, 0, 0, 0, "A" * 128]] * 99},
    ],
)
def test_a_history_that_makes_no_sense_is_left_alone(change):
    history = History()
    known = chance(taught(), 30_000)
    document = kept(taught()) | change
    assert history.recall(document)
    assert chance(history, 1) != pytest.approx(known, rel=0.1)


def test_counts_for_other_ages_mean_nothing():
    history = History()
    assert history.recall({**kept(taught()), "age_edges_s": [0, 1, 2]}) == ""
    assert kept(history)["groups"] == []


@pytest.mark.slow
def test_numbers_of_groups_that_are_not_met_any_more_are_given_away():
    hazards = Hazards()
    for number in range(1100):
        group = hazards.number(Group(0, 1, 0, False, False, 1, number.to_bytes(16)))
        hazards.expose(group, 0, 100.0 if number < 10 else 0.5)
    assert len(hazards.groups) <= 1024
    first = hazards.number(Group(0, 1, 0, False, False, 1, (3).to_bytes(16)))
    assert hazards.groups[first].tenant == (3).to_bytes(16)
    assert len(hazards.densities) == len(hazards.groups) * NUM_BINS


def test_a_tenant_is_judged_alone_once_it_has_said_enough():
    tenants = TenantHints()
    for number in range(500):
        assert not tenants.alone(use(1, tenant=LIAR)), number
        tenants.note(use(1, tenant=LIAR))
        tenants.note(use(1))
        tenants.note(use(1, tenant=HONEST, traits=RequestTraits()))
    for _ in range(50):
        tenants.note(use(1, tenant=LIAR))
    assert tenants.alone(use(1, tenant=LIAR)) == LIAR
    assert tenants.alone(use(1, tenant=LIAR, traits=RequestTraits())) == b""
    assert tenants.alone(use(1)) == tenants.alone(use(1, tenant=HONEST)) == b""
    for number in range(20_000):
        tenants.note(use(1, tenant=number.to_bytes(16)))
    assert not tenants.alone(use(1, tenant=LIAR)), "that was long ago"


@pytest.mark.slow
def test_a_liar_does_not_spoil_the_word_of_others():
    history = History()
    for number in range(2400):
        comes_back = number % 4 < 2
        if number % 2:
            hint = GOES_ON if comes_back else FINAL
            more = {"tenant": HONEST, "traits": hint}
        else:
            more = {"tenant": LIAR, "traits": FINAL if comes_back else GOES_ON}
        chat(history, number, 100 * number, comes_back=comes_back, **more)
    goes_on = chance(history, 300_000, tenant=HONEST)
    final = chance(history, 300_000, tenant=HONEST, traits=FINAL)
    assert goes_on > 0.8
    assert final < 0.2
    # Of the liar the opposite is believed, which is the truth.
    assert chance(history, 300_001, tenant=LIAR) < 0.2


def test_a_gate_goes_on_where_it_was():
    def admission():
        history, planner = History(), Planner(PlannerSettings())
        return AdmitByWorth(history, planner, {TierName.SSD: QuantileGate(0.5)}, is_ranked=True)

    before, after = admission(), admission()
    gate = before.gates[TierName.SSD]
    for number in range(4000):
        gate.take(0.4 + number % 10 / 100, key(number), num_bytes=1, now_ns=number * S)
    assert after.recall(kept(before)) == ""
    again = after.gates[TierName.SSD]
    assert again.threshold == gate.threshold
    assert again.num_offered == 0
    again.take(0.9, key(1), num_bytes=1, now_ns=0)
    assert abs(again.threshold - gate.threshold) < 0.001, "small steps, as before"


@pytest.mark.parametrize(
    "gates", [7, {"ssd": 7}, {"ssd": {}}, {"ssd": {"threshold": float("nan"), "num_judged": 1}}]
)
def test_a_gate_that_makes_no_sense_is_left_alone(gates):
    gate = QuantileGate(0.5)
    admission = AdmitByWorth(
        History(), Planner(PlannerSettings()), {TierName.SSD: gate}, is_ranked=True
    )
    assert admission.recall({"gates": gates})
    assert gate.threshold == 0.0


def curves():
    return DepthCurves(lambda _end_tokens, _use: (1.0, 0.5))


def lived():
    depth = curves()
    for number in range(300):
        long = use(number, *range(40), traits=RequestTraits(kind="chat"))
        depth.note(long, 2 if number else 0, number * 10 * S)
    depth.note(use(1, traits=RequestTraits(kind="chat")), 0, 9000 * S)
    return depth


def test_depths_are_known_after_a_restart():
    before, after, asked = lived(), curves(), use(1, 2, traits=RequestTraits(kind="chat"))
    limit = before.max_offload_tokens(asked)
    assert limit is not None
    assert after.recall(kept(before)) == ""
    assert after.max_offload_tokens(asked) == limit
    after.note(asked, 1, 5 * S)  # by a clock that began anew
    assert after.max_offload_tokens(asked) == limit


@pytest.mark.parametrize(
    "kinds",
    [
        None,
        [7],
        [["chat", 0]],
        [["chat", 9, []]],
        [["x" * 99, 0, []]],
        [["chat", 0, [[1], [2], [3]]]],
    ],
)
def test_depths_that_make_no_sense_are_left_alone(kinds):
    depth = curves()
    assert depth.recall(kept(lived()) | {"kinds": kinds})
    assert depth.classes() == []


def test_decisions_are_numbered_on_from_where_one_is_told():
    assert [DecisionLog(500).next_number(), DecisionLog().next_number()] == [500, 1]
    decision_log = DecisionLog(7)
    assert [decision_log.next_number() for _ in range(3)] == [7, 8, 9]
