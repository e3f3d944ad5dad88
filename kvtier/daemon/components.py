"""Creates the components around the node, before any of them starts."""

from collections.abc import Callable
from functools import partial
from typing import Any

from kvtier.api.rpc.operator_service import OperatorReports
from kvtier.config import Config
from kvtier.core.tier_registry import STORE_TIER, TierName
from kvtier.daemon.persistence.key_spaces import SavedKeySpaces
from kvtier.daemon.persistence.learned_state import LearnedState, Learner
from kvtier.daemon.policies import Policies
from kvtier.daemon.reload import Reload
from kvtier.daemon.serving.secrets import DaemonSecrets
from kvtier.daemon.status.document import Status
from kvtier.daemon.status.explain import Explainer
from kvtier.daemon.status.gauges import Gauges
from kvtier.daemon.status.health import NodeHealth
from kvtier.daemon.tiers.admin import TierAdmin
from kvtier.daemon.tiers.benchmark_runner import BenchmarkRunner
from kvtier.daemon.tiers.memory import Reservation
from kvtier.daemon.tiers.opening import OpenTier, devices_of
from kvtier.node.messages import events as ev
from kvtier.observe.log import Log, RateLimitedLog
from kvtier.runtime.driver import Driver
from kvtier.runtime.scrubber import TierScrubber
from kvtier.runtime.worker_pool import run_in_thread
from kvtier.tiers.host import HostArena
from kvtier.tiers.seal import KeyRing

__all__ = ["DaemonComponents"]


class DaemonComponents:
    """The components around ``driver``, whose node already has the recovered blocks."""

    def __init__(
        self,
        driver: Driver,
        arena: HostArena,
        policies: Policies,
        config: Callable[[], Config],
        *,
        open_tier: OpenTier,
        reload: Reload,
        ring: KeyRing | None,
    ) -> None:
        """``config`` returns the current configuration."""
        now = config()
        directory = now.tiers[STORE_TIER].state_directory if STORE_TIER in driver.tiers else None
        block_tokens = now.engine.block_tokens
        self.driver = driver
        self.reload = reload
        self.scrubber = TierScrubber(driver, STORE_TIER)
        self.reservation = Reservation(arena, lambda num: driver.post(ev.SlabsReserved(num)))
        self.tier_admin = TierAdmin(driver, config, open_tier)
        self.tier_admin.on_attach = self._prepare_attach
        reload.is_free = self.tier_admin.is_free
        self.secrets = DaemonSecrets(driver, reload, *([ring] if ring else []))
        self.health = NodeHealth(driver, self.reservation.health, self.tier_admin.health)
        self.gauges = Gauges(driver, self.health, policies)
        self.spaces = SavedKeySpaces(driver, directory)
        self._config = config
        self._log = RateLimitedLog(Log("kvtier.daemon"))
        driver.add_register_listener(self._registered)
        self.benchmarks = BenchmarkRunner(driver, policies.planner, devices_of(now, driver.tiers))
        self.status = Status(
            driver,
            self.health,
            self.spaces,
            policies,
            block_tokens,
            config=self._settings,
            unmeasured=self.benchmarks.unmeasured,
        )
        self.explainer = Explainer(driver.node, self.spaces, block_tokens)
        learners: dict[str, Learner] = {
            "probe": self.benchmarks,
            "cost": policies.planner,
            "gate": policies.admission,
            "reuse": policies.history,
            "depth": policies.depth,
        }
        self.learned = LearnedState(driver, learners, directory)
        self.learned.recall()

    def reports(self) -> OperatorReports:
        """Return the functions behind the operator's calls."""
        return OperatorReports(
            stat=self.status.document,
            explain=self.explainer.document,
            benchmark=self.benchmarks.probe,
            pause_benchmarks=self.benchmarks.hold,
            reload=self.reload.ask,
            config=self.reload.effective,
        )

    def _settings(self) -> dict[str, Any]:
        return self.reload.document() | {"secrets": self.secrets.document()}

    def _registered(self, event: ev.Register) -> None:
        """Record a new engine, and log how many of its tokens each tier can hold."""
        self.spaces.registered(event)
        config, layout = self._config(), event.layout
        held_bytes = {"cpu": config.cpu.capacity_bytes}
        held_bytes |= {
            name.value: section.reported_bytes
            for name, section in config.tiers.items()
            if section.is_enabled and section.reported_bytes
        }
        self._log.info(
            "engine attached",
            engine=event.engine,
            pid=event.pid,
            shortest_prefix_tokens=layout.block_tokens,
            token_bytes=layout.block_bytes // layout.block_tokens,
            **{
                f"{name}_tokens": num_bytes // layout.block_bytes * layout.block_tokens
                for name, num_bytes in held_bytes.items()
            },
        )

    async def _prepare_attach(self, name: TierName, config: Config) -> None:
        """Move components that depend on a tier's device to the new one, before the attach."""
        devices = await run_in_thread(partial(devices_of, config, [name]), "kvtier-devices")
        self.benchmarks.renew(name, devices.get(name, ""))
        directory = config.tiers[name].state_directory
        if name is STORE_TIER and directory is not None:
            await self.spaces.move_to(directory)
            await self.learned.move_to(directory)
