"""The real product under load, and a real Prometheus that scrapes it with our rules."""

import contextlib
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from kvtier.testing.child import Child, free_port
from kvtier.testing.running_node import RunningNode, complete, url_of
from tests.deploy.replayed import VLLM_PAGE, Replayed
from tests.engine.models import VOCAB, save_tiny
from tests.integration.certificates import Authority, write_secret
from tests.integration.redis_child import RedisServer
from tests.programs import requires

ROOT = Path(__file__).resolve().parents[2]
RULES = sorted(ROOT.glob("deploy/prometheus/*.yml"))

PROMPT_TOKENS = 384
NUM_PROMPTS = 14
"""More than GPU pool, CPU tier and SSD tier hold together, so that each tier is asked."""

SETTINGS = {
    "cost.restore": "auto",
    "cost.probe": "start",
    "cpu.capacity": "12MiB",
    "ssd.capacity": "20MiB",
    "ssd.write_budget": "1GiB",
    "engine.pool": "8MiB",
}


def save_model(folder: Path) -> Path:
    """Write a model so slow for its size that restoring pays on any machine; 6 KiB a token."""
    return save_tiny(
        folder,
        hidden_size=256,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=4,
        head_dim=64,
        initializer_range=0.05,
    )


class Prometheus:
    """A server of our own on loopback; ask it what Grafana would ask."""

    def __init__(self, directory: Path, targets: Mapping[str, str]) -> None:
        """``targets`` are addresses by job."""
        self.url = f"http://127.0.0.1:{free_port()}"
        scraped = [
            {"job_name": job, "static_configs": [{"targets": [address]}]}
            for job, address in targets.items()
        ]
        configuration = {
            "global": {
                "scrape_interval": "2s",
                "scrape_timeout": "2s",
                "evaluation_interval": "2s",
            },
            "rule_files": [str(path) for path in RULES],
            "scrape_configs": scraped,
        }
        file = directory / "prometheus.yml"
        file.write_text(yaml.safe_dump(configuration))
        words = [
            requires("prometheus"),
            f"--config.file={file}",
            f"--storage.tsdb.path={directory / 'tsdb'}",
        ]
        words.append(f"--web.listen-address={self.url.removeprefix('http://')}")
        self.child = Child(words, directory / "prometheus.log")

    def ask(self, path: str, **arguments: str) -> Any:
        """Return what an API path answers; fails with its message where it refuses."""
        answer = httpx.get(
            f"{self.url}/api/v1/{path}", params=arguments, timeout=10, trust_env=False
        )
        assert answer.status_code == httpx.codes.OK, f"{arguments}: {answer.text}"
        return answer.json()["data"]

    def now(self, expr: str) -> list[Any]:
        """Return an expression's series as they are now, each with one value."""
        return list(self.ask("query", query=filled(expr))["result"])

    def lately(self, expr: str, seconds: float = 60.0) -> list[Any]:
        """Return an expression's series of the last seconds, each with its values."""
        end_s = int(time.time())  # whole seconds, so that series of two queries can be stacked
        span = {"start": str(end_s - seconds), "end": str(end_s), "step": "1"}
        return list(self.ask("query_range", query=filled(expr), **span)["result"])


def filled(expr: str) -> str:
    """Return an expression as Grafana would send it, with everything chosen."""
    chosen = {"$__rate_interval": "15s", "$__range": "60s", "$job": ".*", "$instance": ".*"}
    for variable, value in chosen.items():
        expr = expr.replace(variable, value)
    return expr


@dataclass(frozen=True)
class Observed:
    """A node with an engine, and who watches them."""

    node: RunningNode
    daemon: Child
    engine: Child
    prometheus: Prometheus


@contextlib.contextmanager
def observed(directory: Path, seed: int = 7) -> Iterator[Observed]:
    """Run them, with requests going on within the context; of vLLM there is what one has told."""
    print(f"load seed {seed}")
    model = save_model(directory / "model")
    server = RedisServer(directory)
    node = RunningNode(directory, SETTINGS | {"remote.url": server.url} | operators_port(directory))
    with contextlib.ExitStack() as stack:
        stack.enter_context(server.start())
        daemon = stack.enter_context(node.start("serve"))
        daemon.await_log("event=ready")
        engine = stack.enter_context(node.start("engine", "--model", str(model)))
        url = url_of(engine)
        address = url.removeprefix("http://")
        vllm = stack.enter_context(Replayed(VLLM_PAGE)).address
        own = f"127.0.0.1:{node.http_port}"
        targets = {"kvtier": own, "kvtier-engine": address, "vllm": vllm}
        prometheus = Prometheus(directory, targets)
        stack.enter_context(prometheus.child).await_log("Server is ready")
        stack.enter_context(requests(url, seed))
        yield Observed(node, daemon, engine, prometheus)


def operators_port(directory: Path) -> dict[str, str]:
    """Return settings for one, which has a certificate."""
    pair = Authority(directory).pair("daemon")
    return {
        "rpc.listen": f"127.0.0.1:{free_port()}",
        "rpc.tls_cert": str(pair.certificate),
        "rpc.tls_key": str(pair.key),
        "rpc.token_file": str(write_secret(directory / "token", "of-operators-0123456789")),
    }


@contextlib.contextmanager
def requests(url: str, seed: int) -> Iterator[None]:
    """Have two clients ask again and again within the context; fails if one was refused."""
    is_over = threading.Event()
    faults: list[BaseException] = []
    threads = [
        threading.Thread(target=_ask, args=(url, seed + n, is_over, faults)) for n in range(2)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join(60)
    if faults:
        raise faults[0]


def _ask(url: str, seed: int, is_over: threading.Event, faults: list[BaseException]) -> None:
    """Ask for old prompts and, now and then, for what was asked a moment ago: the GPU has it."""
    choose = random.Random(seed)
    prompts = [_prompt(number) for number in range(NUM_PROMPTS)]
    try:
        while not is_over.is_set():
            prompt = choose.choice(prompts)
            for _ in range(choose.choice((1, 1, 2))):
                complete(url, prompt, max_tokens=4)
    except BaseException as fault:
        faults.append(fault)


def _prompt(number: int) -> Sequence[int]:
    return random.Random(number).choices(range(3, VOCAB), k=PROMPT_TOKENS)
