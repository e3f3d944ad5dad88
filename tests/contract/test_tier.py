"""Every tier and every wrapper passes the same suite."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.core.identity import EVERYTHING
from kvtier.testing.faulty_tier import FaultyTier, scripted_faults
from kvtier.testing.throttle_tier import ThrottleTier
from kvtier.testing.tier_contract import TierContract, soon
from kvtier.tiers.base import Tier
from kvtier.tiers.breaker import BreakerTier
from kvtier.tiers.memory import EvictionOrder, MemoryTier
from kvtier.tiers.redis.tier import RedisOptions, RedisTier
from kvtier.tiers.seal import KeyRing, Seal, SealMode
from kvtier.tiers.ssd.disk import DirectIO
from kvtier.tiers.ssd.options import Durability, SsdOptions
from kvtier.tiers.ssd.store import SsdTier

CAPACITY_BYTES = 16 << 20


class TestMemoryTier(TierContract):
    @pytest.fixture(params=list(EvictionOrder))
    def tier(self, request: pytest.FixtureRequest) -> Iterator[Tier]:
        tier = MemoryTier(CAPACITY_BYTES, order=request.param)
        yield tier
        tier.close()


class TestSsdTier(TierContract):
    @pytest.fixture(
        params=[
            SsdOptions(DirectIO.AUTO),
            SsdOptions(DirectIO.AUTO, Durability.BATCH),
            SsdOptions(DirectIO.OFF),
        ],
        ids=["direct", "direct-batch", "buffered"],
    )
    def tier(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
        tier = SsdTier(tmp_path / "ssd", CAPACITY_BYTES, 1 << 20, request.param)
        yield tier
        tier.close()


@pytest.mark.redis
class TestRedisTier(TierContract):
    @pytest.fixture(params=["plain", "split", "encrypted"])
    def tier(
        self, request: pytest.FixtureRequest, redis_server: str, tmp_path: Path
    ) -> Iterator[Tier]:
        options = RedisOptions(key_prefix="contract:", timeout_s=10)
        if request.param != "plain":
            options = replace(options, value_bytes=1024)
        if request.param == "encrypted":
            file = tmp_path / "keys"
            file.write_text(f"first {7:064x}\n")
            file.chmod(0o600)
            seal = Seal(SealMode.ENCRYPT, KeyRing.load(file), "remote")
            options = replace(options, seal=seal)
        tier = RedisTier(redis_server, options)
        tier.purge(EVERYTHING, soon())
        yield tier
        tier.close()


class TestWrapper(TierContract):
    @pytest.fixture(params=["breaker", "faulty", "throttle", "all"])
    def tier(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
        tier: Tier = MemoryTier(CAPACITY_BYTES)
        if request.param in {"faulty", "all"}:
            tier = FaultyTier(tier, scripted_faults())
        if request.param in {"breaker", "all"}:
            tier = BreakerTier(tier, faults_max=100)
        if request.param in {"throttle", "all"}:
            tier = ThrottleTier(tier, bytes_per_s=1e9, latency_s=0.0001)
        yield tier
        tier.close()


class TestSsdTierByWorth(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        options = SsdOptions(value_per_byte=lambda hashes: [each[0] for each in hashes])
        tier = SsdTier(tmp_path / "ssd", CAPACITY_BYTES, 1 << 20, options)
        yield tier
        tier.close()
