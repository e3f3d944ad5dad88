"""Creates the policies of the configuration: restoring, eviction, admission and offload depth."""

from dataclasses import dataclass

from kvtier.config import Config
from kvtier.core.admission import AdmitByWorth, QuantileGate
from kvtier.core.eviction import EVICTION_POLICIES
from kvtier.core.eviction.base import Eviction
from kvtier.core.plan import PlannerSettings
from kvtier.core.planner import Planner
from kvtier.core.residency import TierName
from kvtier.core.reuse.depth import DepthCurves
from kvtier.core.reuse.history import History, Use
from kvtier.core.slow_tier import WriteMode

__all__ = ["Policies", "policies"]

_COPY_DELAY_SHARE = 0.1
"""Share of an engine's time to copy a block out that delays its requests. It copies between steps
or during them; this is a conservative guess."""


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies of a node."""

    rule: str
    """Name of the eviction policy."""
    eviction: Eviction
    admission: AdmitByWorth
    history: History
    planner: Planner
    depth: DepthCurves

    def adopt(self, config: Config) -> None:
        """Apply the settings that a reload may change; keeps the learned state."""
        self.planner.adopt(_planner_settings(config))
        self.depth.most_tokens = _most_tokens(config)
        self.depth.is_prompt_alone = not config.policy.answers
        gates, wanted = self.admission.gates, _gates(config)
        for tier, gate in wanted.items():
            gates.setdefault(tier, gate).most_share = gate.most_share
        for tier in gates.keys() - wanted.keys():  # its write mode has changed
            del gates[tier]


def policies(config: Config) -> Policies:
    """Return the policies of a configuration."""
    policy = config.policy
    planner = Planner(_planner_settings(config))
    used = {TierName.CPU: EVICTION_POLICIES[policy.eviction]}
    for tier, section in config.tiers.items():
        if not tier.is_shared:  # a shared tier has its own eviction
            used[tier] = EVICTION_POLICIES[section.eviction_policy(policy.eviction)]
    history = History(
        planner.saved_s if any(each.is_weighed for each in used.values()) else None,
        [tier for tier, each in used.items() if each.is_ranked and not each.is_weighed],
    )
    chosen = used[TierName.CPU]
    return Policies(
        rule=policy.eviction,
        eviction=chosen.create(history),
        admission=AdmitByWorth(history, planner, _gates(config), is_ranked=chosen.is_ranked),
        history=history,
        planner=planner,
        depth=DepthCurves(
            lambda end_tokens, use: _worth_s(planner, end_tokens, use),
            _most_tokens(config),
            is_prompt_alone=not policy.answers,
        ),
    )


def _planner_settings(config: Config) -> PlannerSettings:
    cost = config.cost
    return PlannerSettings(
        mode=cost.restore,
        is_split_allowed=cost.split,
        is_guarded=cost.guard,
        wait_max_ns=cost.wait_max_ns,
    )


def _most_tokens(config: Config) -> int | None:
    most_tokens = config.policy.max_offload_tokens
    return None if most_tokens == "auto" else most_tokens


def _gates(config: Config) -> dict[TierName, QuantileGate]:
    """Return a gate for each tier with the write mode ``demote``."""
    return {
        tier: QuantileGate(section.gate_share)
        for tier, section in config.tiers.items()
        if section.write_mode is WriteMode.DEMOTE
    }


def _worth_s(planner: Planner, end_tokens: int, use: Use) -> tuple[float, float]:
    """Return the seconds saved by one reuse of a block in the CPU tier, and lost by storing it."""
    saved_s = planner.saved_s(end_tokens, use.block_tokens)
    if not planner.is_measured(TierName.CPU):  # a guess would never be corrected
        return saved_s, 0.0
    # The cost of one block more: a restore has one start-up time, however deep it goes.
    one_s, two_s = (planner.restore_s(TierName.CPU, n * use.payload_bytes) for n in (1, 2))
    copy_s = max(0.0, two_s - one_s)
    return max(0.0, saved_s - copy_s), _COPY_DELAY_SHARE * copy_s
