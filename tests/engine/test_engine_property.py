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

from kvtier.core.plan import PlanReason, RestorePlan
from kvtier.engine.model import LoadedModel
from kvtier.engine.port import PortLookup
from kvtier.engine.request import FinishReason, Sampling
from kvtier.testing.memory_port import LoadScript, MemoryPort
from tests.engine.drive import Answer, Drive, prompt
from tests.engine.models import Reference

STEM = prompt(230, seed=77)
"""Prompts begin with some of it, so that they share blocks."""

LENGTHS = (1, 16, 33, 64, 65, 97, 129, 150, 192, 193, 230, 230)


class EngineMachine(RuleBasedStateMachine):
    loaded: LoadedModel
    reference: Reference

    @initialize(
        pool_tokens=st.sampled_from([304, 400, 640]),
        max_batch_tokens=st.sampled_from([4, 24, 64, 512]),
        is_manual=st.booleans(),
        block_tokens=st.sampled_from([32, 64]),
        is_split=st.booleans(),
    )
    def begin(
        self,
        pool_tokens: int,
        max_batch_tokens: int,
        is_manual: bool,
        block_tokens: int,
        is_split: bool,
    ) -> None:
        self.port = MemoryPort(block_tokens=block_tokens, is_manual=is_manual)
        self.change_the_plan(10 if is_split else None, is_split)
        self.drive = Drive(
            self.loaded,
            self.port,
            pool_tokens=pool_tokens,
            max_batch_tokens=max_batch_tokens,
            max_num_sequences=4,
            block_tokens=block_tokens,
        )
        self.asked: dict[str, tuple[tuple[int, ...], int, Answer]] = {}
        self.warm()

    def warm(self) -> None:
        """Have the tiers below know the stem, and the GPU not: loads come from the start."""
        self.port.is_manual, is_manual = False, self.port.is_manual
        answer = self.drive.ask(STEM, 1)
        self.asked["request-1"] = STEM, 1, answer
        self.drive.engine.drop_cache()
        self.port.is_manual = is_manual

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

    @rule(num_blocks=st.sampled_from([None, 0, 1, 2, 10]), is_split=st.booleans())
    def change_the_plan(self, num_blocks: int | None, is_split: bool) -> None:
        def make_plan(found: PortLookup) -> RestorePlan | None:
            if num_blocks is None or not found.tiers:
                return None
            reason = PlanReason.SPLIT if is_split else PlanReason.PART
            return RestorePlan(1, min(num_blocks, len(found.tiers)), reason, is_split)

        self.port.make_plan = make_plan

    @rule(most=st.sampled_from([0, 1, 2, 3]))
    def change_how_often_a_load_is_met(self, most: int) -> None:
        self.port.meets_max = most

    @precondition(lambda self: self.port.open_loads)
    @rule(choice=st.randoms(use_true_random=False), most=st.integers(0, 3))
    def report_some(self, choice: Random, most: int) -> None:
        name = choice.choice(sorted(self.port.open_loads))
        self.port.report_loaded(name, self.port.open_loads[name].num_filled + most)

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
        self.port.meets_max = 0
        self.port.finish_all()
        self.drive.run()
        assert self.drive.engine.snapshot().pool_blocks.used == 0
        assert set(self.port.finished) == set(self.asked), "the port knows which are done with"
        assert set(self.port.announced) <= set(self.asked)
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
