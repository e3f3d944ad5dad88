import numpy as np
from rows import SCOPE, add, chain

from kvtier.core.index import BlockIndex, Scope
from kvtier.core.residency import Residency, TierName
from kvtier.node.state.block_run import PromptChain, find_run

CPU, SSD, REMOTE = TierName.CPU, TierName.SSD, TierName.REMOTE
HEADERS = chain(1, 2, 3, 4)
ALL = frozenset({CPU, SSD, REMOTE})


def asked(scope=SCOPE, payload_bytes=5000, headers=HEADERS):
    return PromptChain.of(scope, b"".join(h.block_hash for h in headers), payload_bytes)


def known(*states):
    """An index of the chain, with each block's state in the CPU, SSD and remote tiers."""
    index = BlockIndex()
    rows = add(index, HEADERS[: len(states)])
    for row, state in zip(rows.tolist(), states, strict=True):
        for tier, cell in zip((CPU, SSD, REMOTE), state, strict=True):
            index.move(row, tier, Residency(cell))
    return index


def test_a_chain_knows_the_hash_before_each():
    assert [p.tobytes() for p in asked().parents] == [h.parent_hash for h in HEADERS]
    assert len(asked(headers=[]).parents) == 0


def test_the_fastest_tier_is_named_first():
    run = find_run(known((2, 2, 2), (0, 2, 2), (0, 0, 2)), asked(), 0, ALL)
    assert run.by_tier() == ((CPU, 1), (SSD, 1), (REMOTE, 1))
    sources = [run.sources(place) for place in range(3)]
    assert sources == [(CPU, SSD, REMOTE), (SSD, REMOTE), (REMOTE,)]
    assert run.reason == "absent"


def test_a_whole_chain_is_complete():
    assert find_run(known(*[(2, 0, 0)] * 4), asked(), 0, ALL).reason == "complete"
    assert find_run(known(*[(2, 0, 0)] * 4), asked(), 4, ALL).reason == "complete"
    assert find_run(BlockIndex(), asked(headers=[]), 0, ALL).reason == "complete"


def test_blocks_before_the_first_may_be_missing():
    run = find_run(known((0, 0, 0), (2, 0, 0)), asked(), 1, ALL)
    assert run.by_tier() == ((CPU, 1),)


def test_a_block_on_its_way_in_is_pending():
    run = find_run(known((1, 0, 0), (1, 2, 0)), asked(), 0, ALL)
    assert run.by_tier() == ((CPU, 2),)
    assert run.is_writing.tolist() == [True, True]


def test_a_block_on_its_way_out_below_is_not_there():
    assert len(find_run(known((0, 1, 0)), asked(), 0, ALL)) == 0
    assert len(find_run(known((3, 2, 2)), asked(), 0, ALL)) == 0


def test_a_tier_that_cannot_be_used_has_nothing():
    index = known((0, 2, 0), (0, 2, 2))
    assert len(find_run(index, asked(), 0, frozenset({REMOTE}))) == 0
    assert find_run(index, asked(), 1, frozenset({REMOTE})).by_tier() == ((REMOTE, 1),)


def test_another_identity_is_not_served():
    index = known(*[(2, 0, 0)] * 4)
    for chain_asked, first in (
        (asked(Scope(SCOPE.key_space, b"another tenant..")), 0),
        (asked(payload_bytes=4999), 0),
        (asked(headers=HEADERS[1:]), 0),
    ):
        run = find_run(index, chain_asked, first, ALL)
        assert len(run) == 0
        assert run.reason == "identity"


def test_finding_changes_nothing():
    index = known((2, 0, 0))
    before = index.state.copy()
    find_run(index, asked(), 0, ALL)
    assert len(index) == 1
    assert np.array_equal(before, index.state)


def test_a_tier_that_is_not_to_be_used_is_passed_over():
    index = known((2, 2, 2), (1, 0, 0))
    assert find_run(index, asked(), 0, frozenset({SSD})).by_tier() == ((SSD, 1),)
    assert len(find_run(index, asked(), 1, frozenset({SSD}))) == 0
