"""Any order of requests, aborts, port events and faults: right tokens and sums, no block lost."""

from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtier.engine.model import LoadedModel
from kvtier.engine.request import FinishReason, Sampling
from kvtier.testing.memory_port import LoadScript, MemoryPort
from tests.engine.drive import Answer, Drive, prompt
from tests.engine.models import Reference

STEM = prompt(150, seed=77)
"""Prompts begin with some of it, so that they share blocks."""

LENGTHS = (1, 16, 17, 33, 63, 64, 65, 97, 128, 129, 150)


class EngineMachine(RuleBasedStateMachine):
    loaded: LoadedModel
    reference: Reference

    @initialize(
        pool_tokens=st.sampled_from([256, 320, 480]),
        max_batch_tokens=st.sampled_from([4, 24, 64, 512]),
        is_manual=st.booleans(),
    )
    def begin(self, pool_tokens: int, max_batch_tokens: int, is_manual: bool) -> None:
        self.port = MemoryPort(is_manual=is_manual)
        self.drive = Drive(
            self.loaded,
            self.port,
            pool_tokens=pool_tokens,
            max_batch_tokens=max_batch_tokens,
            max_num_sequences=4,
        )
        self.asked: dict[str, tuple[tuple[int, ...], int, Answer]] = {}

    @rule(
        shared=st.sampled_from(LENGTHS),
        own=st.integers(0, 3),
        max_tokens=st.sampled_from([1, 2, 17, 40]),
        max_load_tokens=st.sampled_from([None, None, 0, 64]),
        max_offload_tokens=st.sampled_from([None, None, 0, 64]),
    )
    def submit(
        self,
        shared: int,
        own: int,
        max_tokens: int,
        max_load_tokens: int | None,
        max_offload_tokens: int | None,
    ) -> None:
        tokens = STEM[:shared] + prompt(own * 8, seed=own)
        answer = self.drive.submit(
            tokens,
            max_tokens,
            sampling=Sampling(ignore_eos=False),
            max_load_tokens=max_load_tokens,
            max_offload_tokens=max_offload_tokens,
        )
        name = f"request-{len(self.asked) + 1}"
        self.asked[name] = tokens, max_tokens, answer

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.drive.step()

    @precondition(lambda self: self.asked)
    @rule(choice=st.randoms(use_true_random=False))
    def abort(self, choice: Random) -> None:
        self.drive.engine.abort(choice.choice(sorted(self.asked)))

    @rule(num_blocks=st.sampled_from([None, 0, 1, 2]), is_reported_early=st.booleans())
    def change_the_script(self, num_blocks: int | None, is_reported_early: bool) -> None:
        self.port.script = LoadScript(num_blocks, "failed", is_reported_early)

    @rule(most=st.sampled_from([None, 0, 1]))
    def change_what_is_taken(self, most: int | None) -> None:
        self.port.stores_taken_max = most

    @precondition(lambda self: self.port.open_lookups or self.port.open_loads)
    @rule(choice=st.randoms(use_true_random=False))
    def finish_some(self, choice: Random) -> None:
        for name in sorted(self.port.open_lookups):
            if choice.random() < 0.5:
                self.port.finish_lookup(name)
        for name in sorted(self.port.open_loads):
            if choice.random() < 0.5:
                self.port.finish_load(name)

    @precondition(lambda self: self.port.open_stores)
    @rule(choice=st.randoms(use_true_random=False))
    def finish_a_store(self, choice: Random) -> None:
        self.port.finish_store(choice.choice(sorted(self.port.open_stores)))

    @rule()
    def drop(self) -> None:
        self.drive.engine.drop_cache()

    @invariant()
    def holds(self) -> None:
        self.drive.engine.check()

    def teardown(self) -> None:
        if not hasattr(self, "drive"):
            return
        self.port.is_manual = False
        self.port.finish_all()
        self.drive.run()
        assert self.drive.engine.snapshot().pool_blocks.used == 0
        for tokens, max_tokens, answer in self.asked.values():
            assert answer.is_done
            assert answer.usage.completion_tokens == len(answer.tokens)
            expected = self.reference.generate(tokens, max_tokens)
            if answer.finish is FinishReason.ABORT:
                assert answer.tokens == expected[: len(answer.tokens)]
            else:
                assert answer.tokens == expected
                assert answer.usage.prompt_tokens == len(tokens)


@pytest.mark.slow
def test_any_history(tiny: LoadedModel, reference: Reference) -> None:
    bound = type("Bound", (EngineMachine,), {"loaded": tiny, "reference": reference})
    run_state_machine_as_test(
        bound,
        settings=settings(
            max_examples=60,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
