"""If a connector cannot be imported, vLLM starts without it; tested with stand-ins for vLLM."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

BASE = """
from abc import ABC, abstractmethod
from enum import Enum

class KVConnectorRole(Enum):
    SCHEDULER = 0
    WORKER = 1

class KVConnectorMetadata(ABC):
    pass

class KVConnectorHandshakeMetadata(ABC):
    pass

class KVConnectorWorkerMetadata(ABC):
    pass

class SupportsHMA(ABC):
    @abstractmethod
    def request_finished_all_groups(self, request, block_ids): ...

class KVConnectorBase_V1(ABC):
    def __init__(self, vllm_config, role, kv_cache_config):
        self.role = role

    @abstractmethod
    def start_load_kv(self, forward_context, **kwargs): ...
    @abstractmethod
    def get_num_new_matched_tokens(self, request, num_computed_tokens): ...
    @abstractmethod
    def update_state_after_alloc(self, request, blocks, num_external_tokens): ...
    @abstractmethod
    def build_connector_meta(self, scheduler_output): ...
    @abstractmethod
    def a_hook_of_tomorrow(self, what, *, how): ...
"""

OFFLOADING = """
from .base import KVConnectorBase_V1

class OffloadingConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config, role, kv_cache_config):
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.tiers = [tier["type"] for tier in extra.get("secondary_tiers", ())]

    def _nothing(self, *_, **__): ...
    start_load_kv = get_num_new_matched_tokens = update_state_after_alloc = _nothing
    build_connector_meta = a_hook_of_tomorrow = _nothing
"""

TIER_BASE = """
class LookupResult:
    MISS = "miss"

class RequestOffloadingContext:
    pass
"""

TIERING = """
from abc import ABC, abstractmethod
from dataclasses import dataclass

@dataclass
class JobResult:
    job_id: int
    success: bool

class SecondaryTierManager(ABC):
    def __init__(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None):
        pass

    @abstractmethod
    def lookup(self, key, context): ...
    @abstractmethod
    def drain_jobs(self): ...
    @abstractmethod
    def on_new_request(self, context): ...
"""

FACTORY = """
class KVConnectorFactory:
    names = []

    @classmethod
    def register_connector(cls, name, module, class_name):
        if name in cls.names:
            raise ValueError(name)
        cls.names.append(name)
"""

CONNECTOR = """
import json
from kvtier.connectors import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
made = {}
for role in KVConnectorRole:
    assert vllm.KvtierConnector is vllm.KvtierConnector
    made[role.name] = each = vllm.KvtierConnector(None, role, kv_cache_config=None or object())
    each.start_load_kv(None)
    each.update_state_after_alloc(None, None, 0)
    each.a_hook_of_tomorrow(1, how=2)
scheduler = made["SCHEDULER"]
print(json.dumps({
    "matched": scheduler.get_num_new_matched_tokens(None, 0),
    "meta": type(scheduler.build_connector_meta(None)).__name__,
    "finished": scheduler.request_finished_all_groups(None, ()),
    "delivery": scheduler.requires_kv_delivery,
}))
"""

TIER = """
import json
from types import SimpleNamespace
from kvtier.connectors import vllm_tier
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
extra = {"secondary_tiers": [{"type": "fs"}, {"type": "KvtierTier"}]}
config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
connector = vllm_tier.KvtierOffloadingConnector(config, KVConnectorRole.SCHEDULER, None)
tier = vllm_tier.KvtierTier(None, memoryview(b""), "KvtierTier", socket="/s", model=None)
tier.submit_store(SimpleNamespace(job_id=1))
tier.submit_load(SimpleNamespace(job_id=2))
jobs = [(job.job_id, job.success) for job in tier.get_finished_jobs()]
tier.drain_jobs()
print(json.dumps({
    "tiers": connector.tiers,
    "lookup": tier.lookup(b"", None),
    "jobs": jobs,
    "more": list(tier.get_finished_jobs()),
    "context": type(tier.on_new_request(None)).__name__,
}))
"""

REGISTER = """
import json
from kvtier.connectors.vllm.plugin import register
register()
register()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
print(json.dumps(KVConnectorFactory.names))
"""


@pytest.fixture
def fake_vllm(tmp_path: Path) -> Path:
    """Create the parts of a vLLM 0.33 that an idle connector needs, for PYTHONPATH."""
    connectors = tmp_path / "vllm/distributed/kv_transfer/kv_connector"
    offload = tmp_path / "vllm/v1/kv_offload"
    write(tmp_path / "vllm/__init__.py", '__version__ = "0.33.0"\n')
    write(connectors / "factory.py", FACTORY)
    write(connectors / "v1/base.py", BASE)
    write(connectors / "v1/offloading_connector.py", OFFLOADING)
    write(offload / "base.py", TIER_BASE)
    write(offload / "tiering/base.py", TIERING)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def run(home: Path, source: str) -> tuple[Any, list[str]]:
    """Run a program with this vLLM; returns its output and the lines of its log."""
    done = subprocess.run(
        [sys.executable, "-c", "import logging; logging.basicConfig()\n" + source],
        env=os.environ | {"PYTHONPATH": f"{home}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr.splitlines()


def test_another_release_gets_a_connector_that_finds_nothing(fake_vllm: Path) -> None:
    told, log = run(fake_vllm, CONNECTOR)
    assert told == {
        "matched": [0, False],
        "meta": "KVConnectorMetadata",
        "finished": [False, None],
        "delivery": False,
    }
    (line,) = log
    assert "serves vLLM 0.28 to 0.32, and this is 0.33.0" in line
    assert "pip install --upgrade kvtier" in line


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("grpc/__init__.py", "RuntimeError: broken"),
        ("torch/__init__.py", "RuntimeError: broken"),
        ("vllm/distributed/kv_events.py", "RuntimeError: broken"),
        ("unused.py", "ModuleNotFoundError: No module named 'vllm."),
    ],
    ids=["grpc", "torch", "vllm", "missing"],
)
def test_a_fault_at_import_is_a_line(fake_vllm: Path, broken: str, reason: str) -> None:
    """The fault may be in a dependency, or in vLLM itself, which lacks parts of its release."""
    write(fake_vllm / "vllm/__init__.py", '__version__ = "0.32.0"\n')
    write(fake_vllm / broken, 'raise RuntimeError("broken")\n')
    told, (line,) = run(fake_vllm, CONNECTOR)
    assert told["matched"] == [0, False]
    assert "kvtier cannot be imported" in line
    assert reason in line
    assert "pip install --force-reinstall kvtier" in line


def test_behind_vllms_cpu_tier_only_our_tier_is_left_out(fake_vllm: Path) -> None:
    told, log = run(fake_vllm, TIER)
    assert told == {
        "tiers": ["fs"],
        "lookup": "miss",
        "jobs": [[1, False], [2, False]],
        "more": [],
        "context": "RequestOffloadingContext",
    }
    assert len(log) == 2, (
        "one line of the connector, and one of the tier that is created without it here"
    )
    assert all("and this is 0.33.0" in line for line in log)


def test_the_plugin_only_registers_a_name(fake_vllm: Path) -> None:
    assert run(fake_vllm, REGISTER) == (["KvtierConnector"], [])


def test_the_plugin_lets_a_vllm_without_connectors_start(fake_vllm: Path) -> None:
    (fake_vllm / "vllm/distributed/kv_transfer/kv_connector/factory.py").unlink()
    source = "from kvtier.connectors.vllm.plugin import register\nregister()\nprint('true')"
    told, log = run(fake_vllm, source)
    assert told is True
    assert "cannot register KvtierConnector with vLLM" in log[0]


def test_no_other_name_is_invented(fake_vllm: Path) -> None:
    source = "from kvtier.connectors import vllm\nprint(str(hasattr(vllm, 'Other')).lower())"
    assert run(fake_vllm, source) == (False, [])
