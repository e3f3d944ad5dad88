"""An eviction policy takes two files: its class, and a row of the registry."""

from collections.abc import Generator

import pytest

from kvtier.config import Config
from kvtier.core.eviction import EVICTION_POLICIES, EvictionPolicy, own_order_of
from kvtier.core.eviction.leaf_lru import LeafLru
from kvtier.core.index import BlockIndex
from kvtier.core.slots import SlabAllocator
from kvtier.daemon.policies import policies


class NewestFirst(LeafLru):
    """What goes into the first file: it evicts the leaves that were used last."""

    def victims(
        self, index: BlockIndex, slots: SlabAllocator, size: int, before: int | None = None
    ) -> Generator[int, None, None]:
        yield from reversed(list(super().victims(index, slots, size, before)))


EXAMPLE = EvictionPolicy(NewestFirst, "most recently used")
"""What goes into the second one."""


def config_with(name: str) -> Config:
    """Return a configuration, whose values were fixed when its module was imported."""
    config = Config()
    policy = config.policy.model_copy(update={"eviction": name})
    return config.model_copy(update={"policy": policy})


def test_a_row_is_all_that_the_daemon_needs(monkeypatch):
    monkeypatch.setitem(EVICTION_POLICIES, "newest-first", EXAMPLE)
    made = policies(config_with("newest-first"))
    assert isinstance(made.eviction, NewestFirst)
    assert made.rule == "newest-first"
    assert own_order_of("newest-first") == "lru"


def test_a_name_that_is_not_registered_runs_no_other_policy():
    with pytest.raises(KeyError, match="newest-first"):
        policies(config_with("newest-first"))


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_each_policy_can_be_configured(name):
    made = policies(Config.model_validate({"policy": {"eviction": name}}))
    assert type(made.eviction) is type(EVICTION_POLICIES[name].create(made.history))


def test_slower_tiers_follow_ranked_policies():
    followed = {name for name in EVICTION_POLICIES if own_order_of(name) == name}
    assert followed == {"rd", "rd-sec", "lru"}
