"""Write what a real vLLM with kvtier's connector tells Prometheus; dashboards are tried on it.

``python -m tests.deploy.record_vllm .vllm/0.32 tests/deploy/vllm_metrics.txt``, after ``make vllm``
and with a redis-server: a minute. vLLM computes a prompt, has it in its own cache, and then gets it
from each tier.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode, fetch
from kvtier.testing.vllm_server import VllmServer, kvtier_transfer
from tests.integration.redis_child import RedisServer
from tests.vllm.servers import TIERS, ask, await_stored, prompt, running

_SETTINGS = {
    "cpu.capacity": "96MiB",
    "cpu.slab": "8MiB",
    "ssd.capacity": "256MiB",
    "ssd.segment": "32MiB",
}
_LEFT_OUT = ("vllm:cache_config_info", "_created")
"""Paths and sizes of a machine, and times."""


def record(home: Path, directory: Path) -> str:
    """Return the page of a server that has been asked."""
    redis = RedisServer(directory)
    served = RunningNode(directory, _SETTINGS | {"remote.url": redis.url})
    transfer = kvtier_transfer(served.socket, lookup_timeout_ms=5000)
    model = home.parent / "models" / "tiny"
    with ExitStack() as stack:
        stack.enter_context(redis.start())
        server = VllmServer(home, model, directory / "vllm.log", transfer)
        vllm = stack.enter_context(server).await_ready()
        stack.enter_context(running(served))
        asked = prompt(1)
        vllm.ask(asked)
        vllm.ask(asked)
        await_stored(served, 4, *TIERS)
        for tier, dropped in (("cpu", ()), ("ssd", ("cpu",)), ("remote", ("cpu", "ssd"))):

            def has_come(tier: str = tier, dropped: tuple[str, ...] = dropped) -> bool:
                ask(vllm, served, asked, dropped=dropped)
                return vllm.metric("vllm:kvtier_hit_tokens_total", tier=tier) > 0

            await_true(has_come, f"tokens from {tier}")
        return fetch(f"http://{vllm.url}/metrics").decode()


def of_vllm(page: str) -> Iterator[str]:
    """Yield the lines on vLLM and its process that are the same kind of thing everywhere."""
    for line in page.splitlines():
        name = line.split()[2] if line.startswith("#") else line.partition("{")[0].split()[0]
        if name.startswith(("vllm:", "process_")) and not name.endswith(_LEFT_OUT):
            yield line


if __name__ == "__main__":
    with work_directory() as folder:
        lines = list(of_vllm(record(Path(sys.argv[1]).absolute(), folder)))
    Path(sys.argv[2]).write_text("\n".join(lines) + "\n")
