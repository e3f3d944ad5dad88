"""Which servers tests run on, and what they see of them: answers, and which tier had the blocks."""

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from kvtier.testing.child import Child, await_true
from kvtier.testing.running_node import RunningNode
from kvtier.testing.vllm_server import VllmServer

BLOCK_TOKENS = 128
"""Of vLLM's on a CPU, and so of ours."""

TIERS = ("cpu", "ssd", "remote")

RELEASES = os.environ.get("KVTIER_VLLM", "").split()
"""Which of the environments in ``.vllm`` to run in, the first one in full."""

_JOIN_TIMEOUT_S = 20.0
_STORE_TIMEOUT_S = 60.0
_HIT_TIMEOUT_S = 60.0


def _on(*servers: tuple[str, str]) -> pytest.MarkDecorator:
    """Run a test on servers of a release and a model; those of one server on one worker."""
    skipped = pytest.param(None, marks=pytest.mark.skip(reason="make test-vllm runs it"))
    params = [
        pytest.param(server, id="-".join(server), marks=pytest.mark.xdist_group("-".join(server)))
        for server in servers
    ]
    return pytest.mark.parametrize("vllm", params or [skipped], indirect=True)


ON_EACH = _on(*((release, "tiny") for release in RELEASES), *((r, "smol") for r in RELEASES[:1]))
ON_FIRST = _on(*((release, "tiny") for release in RELEASES[:1]))
STARTED = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]


def prompt(seed: int, num_tokens: int = 600) -> list[int]:
    """Return tokens that have nothing in common with those of another seed."""
    choose = random.Random(seed)
    return [choose.randrange(2, 258) for _ in range(num_tokens)]


@dataclass(frozen=True)
class Answer:
    """What vLLM said, and how many tokens it had from which tiers."""

    tokens: list[int]
    loaded: int = 0
    tiers: frozenset[str] = frozenset()


def ask(
    vllm: VllmServer,
    served: RunningNode,
    asked: Sequence[int],
    *,
    dropped: Sequence[str] = (),
    **more: Any,
) -> Answer:
    """Ask with vLLM's own cache and some tiers empty, and with the daemon at rest."""
    vllm.forget()
    served.await_idle(_STORE_TIMEOUT_S)
    served.drop(*dropped)
    found, loaded = _found(served), vllm.hit_tokens()
    tokens = vllm.ask(asked, **more)
    now = _found(served)
    moved = frozenset(tier for tier in TIERS if now[tier] > found[tier])
    return Answer(tokens, int(vllm.hit_tokens() - loaded), moved)


def await_hit(
    vllm: VllmServer,
    served: RunningNode,
    asked: Sequence[int],
    expected: Answer,
    *dropped: str,
    **more: Any,
) -> None:
    """Ask until the blocks come as expected: on a busy machine a tier or a lookup may be late.

    The tokens are the expected ones each time.
    """

    def look() -> bool:
        answer = ask(vllm, served, asked, dropped=dropped, **more)
        assert answer.tokens == expected.tokens
        return answer == expected

    await_true(look, f"{expected.loaded} tokens from {set(expected.tiers)}", _HIT_TIMEOUT_S)


def from_tier(tokens: list[int], loaded: int, tier: str) -> Answer:
    """Return the answer whose first tokens came from one tier."""
    return Answer(tokens, loaded, frozenset({tier}))


def await_stored(served: RunningNode, num_blocks: int, *tiers: str) -> None:
    """Wait until these tiers have so many blocks each; the disk may be busy with others' tests."""

    def look() -> bool:
        return all(served.stat()["tiers"][tier]["blocks"] == num_blocks for tier in tiers)

    await_true(look, f"{num_blocks} blocks in {', '.join(tiers)}", _STORE_TIMEOUT_S)
    served.await_idle(_STORE_TIMEOUT_S)


@contextmanager
def running(served: RunningNode, num_servers: int = 1, **changes: str | int) -> Iterator[Child]:
    """Run a daemon that servers have joined; nothing of theirs is left in it at the end."""
    with served.daemon(**changes) as daemon:
        await_joined(served, num_servers)
        yield daemon
        if daemon.is_running:
            served.await_idle(_STORE_TIMEOUT_S)
            assert daemon.stop() == 0
        assert "Traceback" not in daemon.log


def await_joined(served: RunningNode, num_servers: int = 1) -> None:
    """Wait until both halves of each server's connector are attached."""

    def look() -> bool:
        return len(served.stat()["engines"]) == 2 * num_servers

    await_true(look, "both halves are attached", _JOIN_TIMEOUT_S)


def _found(served: RunningNode) -> dict[str, float]:
    return {
        tier: served.metric("kvtier_lookup_blocks_total", tier=tier, outcome="hit")
        for tier in TIERS
    }
