"""Counts the tokens that engines look up by how they were served, in counters that add up.

Theory
------
While no load is open, every token of a looked-up full block is in one term of each sum::

    asked   = found (by tier) + absent
    found   = left (by the decision's reason) + tokens that may be ordered
    ordered = loaded (by tier) + unloaded (by why the load ended where it did)

Those tokens usually are ordered, unless the request is aborted or its engine gets them otherwise.
Engines themselves count the tokens that they used and computed::

    prompt  = used (by tier, GPU included) + computed

A block may be found in one tier and loaded from another, if it was promoted in between. Tokens of a
request that several ranks serve together, each with its own blocks, count once. Blocks that one
call holds and another copies count as loaded by the first.
"""

from collections import Counter

from kvtier.core.residency import TierName
from kvtier.node.messages.actions import LookupResult
from kvtier.node.state.block_run import BlockRun
from kvtier.node.state.session import LoadLease, Session
from kvtier.observe.daemon_metrics import (
    ABSENT_TOKENS,
    ASKED_TOKENS,
    FOUND_TOKENS,
    LEFT_TOKENS,
    LOADED_TOKENS,
    LOOKUP_BLOCKS,
    ORDERED_TOKENS,
    UNLOADED_TOKENS,
)
from kvtier.observe.metrics import Metrics

__all__ = ["count_load", "count_lookup"]


def count_lookup(
    metrics: Metrics, num_asked: int, run: BlockRun, found: LookupResult, session: Session
) -> None:
    """Count a lookup that asked for ``num_asked`` blocks and was answered with ``found``."""
    pending = int(run.is_writing.sum())
    block_tokens = session.layout.block_tokens if session.is_of_first_rank else 0
    by_tier = Counter[TierName]()
    for tier, length in run.by_tier():
        by_tier[tier] += length
    for tier, length in by_tier.items():
        hits = length - pending if tier is TierName.CPU else length
        metrics.add(LOOKUP_BLOCKS, hits, outcome="hit", tier=tier)
        metrics.add(FOUND_TOKENS, length * block_tokens, tier=tier)
    absent = num_asked - len(run)
    metrics.add(LOOKUP_BLOCKS, pending, outcome="pending", tier=TierName.CPU)
    metrics.add(LOOKUP_BLOCKS, absent, outcome="miss", tier="none")
    metrics.add(ABSENT_TOKENS, absent * block_tokens)
    metrics.add(ASKED_TOKENS, num_asked * block_tokens)
    if found.plan is not None and found.plan.num_blocks < len(run):
        left_tokens = (len(run) - found.plan.num_blocks) * block_tokens
        metrics.add(LEFT_TOKENS, left_tokens, reason=found.plan.reason)


def count_load(metrics: Metrics, lease: LoadLease) -> None:
    """Count a load that has ended, with the blocks that were handed out."""
    if not lease.purpose.brings or not lease.is_of_first_rank:
        return
    metrics.add(ORDERED_TOKENS, lease.num_ordered * lease.block_tokens)
    for tier, num_blocks in Counter(lease.tiers[: lease.num_sent]).items():
        metrics.add(LOADED_TOKENS, num_blocks * lease.block_tokens, tier=tier)
    if lease.num_sent < lease.num_ordered:
        left_tokens = (lease.num_ordered - lease.num_sent) * lease.block_tokens
        metrics.add(UNLOADED_TOKENS, left_tokens, reason=lease.end)
