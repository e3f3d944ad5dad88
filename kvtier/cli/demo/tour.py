"""The tour: the same questions with the document in one tier after the other.

What makes the rows comparable
------------------------------
* Before each single question, every tier above the one that is shown is emptied, so that a pass
  holds three measurements of one thing, and not one and its echo in the GPU.
* The cold pass empties them all: each of its answers is computed from nothing, which makes it a
  reference and not only a first time.
* A pass is reported by the question with its median TTFT: a number that was measured, with the
  tokens that belong to it.
* A tier counts as having served when the answer says so and the daemon's own counters agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.cli.demo.client import ANSWER_TOKENS, DemoAnswer, ModelClient
from kvtier.cli.demo.product import Product
from kvtier.cli.demo.report import DemoProgress
from kvtier.core.residency import TierName
from kvtier.errors import StartError

__all__ = ["COLD", "QUESTIONS", "Pass", "Tour"]

COLD = "cold"
"""The pass that no tier serves."""

QUESTIONS: Sequence[str] = (
    "What is this document about? Answer in one sentence.",
    "Which problem does this document describe?",
    "What should a newcomer remember from this document?",
)
"""Asked in every pass, in this order."""

_TAIL_TOKENS_MAX = 96
"""More than any question takes with what the chat template puts around it."""

_CHARACTERS_PER_TOKEN_MAX = 8
"""Text beyond this many for each token of the context cannot fit, in any language met so far."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass: its answers in the order of the questions, and all that was wrong with it."""

    name: str
    answers: tuple[DemoAnswer, ...]
    is_same_as_cold: bool
    problems: tuple[str, ...]

    @property
    def median(self) -> DemoAnswer:
        """Return the answer with the median TTFT."""
        return sorted(self.answers, key=lambda answer: answer.ttft_s)[len(self.answers) // 2]


class Tour:
    """Leads through the tiers of a product that is not started yet."""

    def __init__(self, product: Product, document: str, progress: DemoProgress) -> None:
        self._product = product
        self._document = document
        self._progress = progress
        self._client: ModelClient | None = None

    def passes(self) -> list[Pass]:
        """Start the product and make every pass."""
        self._start("starting the daemon and the engine")
        if not self._product.stat()["tiers"]["ssd"]["detail"]["direct_io"]:
            self._progress.note("no direct I/O here: SSD hits may come from the page cache")
        self._fit()
        cold = self._pass(COLD, self._product.tiers, ())
        passes = [cold]
        for number, tier in enumerate(self._product.tiers):
            if tier is TierName.SSD:
                self._product.drop(TierName.GPU, TierName.CPU)
                self._product.stop()
                self._start("stopping both processes and starting them again")
            passes.append(self._pass(tier, self._product.tiers[:number], cold.answers))
        return passes

    def _start(self, what: str) -> None:
        with self._progress.step(what):
            self._product.stop()
            self._product.start()
            self._client = ModelClient(self._product.url)
            # The first request of a process pays for more than itself, in every pass alike.
            self._client.ask("Say hello.")

    def _fit(self) -> None:
        """Cut the document to what the model takes. Raises StartError for one too short to show."""
        client = self._asked
        room = client.context_limit - ANSWER_TOKENS - _TAIL_TOKENS_MAX
        text = self._document[: client.context_limit * _CHARACTERS_PER_TOKEN_MAX]
        while (num_tokens := client.count_tokens(text)) > room:
            text = text[: len(text) * room // num_tokens]
        least = _TAIL_TOKENS_MAX + 2 * self._product.block_tokens()
        if num_tokens < least:
            raise StartError(
                "--document",
                f"{num_tokens} tokens are too few to be kept",
                f"give a text of at least {least} tokens",
            )
        if len(text) < len(self._document):
            self._progress.note(
                f"the document has {len(self._document)} characters; the first {len(text)} "
                f"({num_tokens} tokens) fit the model's context of {client.context_limit}"
            )
        self._document = text

    def _pass(self, name: str, emptied: Sequence[TierName], cold: Sequence[DemoAnswer]) -> Pass:
        answers: list[DemoAnswer] = []
        problems: list[str] = []
        for number, question in enumerate(QUESTIONS, start=1):
            with self._progress.step(f"{name}: question {number} of {len(QUESTIONS)}") as step:
                if emptied:
                    self._product.drop(*emptied)
                answer, problem = self._ask(name, question)
                step.result = f"first token after {answer.ttft_s:.3g} s"
            answers.append(answer)
            problems += problem
        is_same = not cold or [a.text for a in answers] == [a.text for a in cold]
        if not is_same:
            problems.append(f"{name}: an answer differs from the cold one")
        return Pass(name, tuple(answers), is_same, tuple(problems))

    def _ask(self, name: str, question: str) -> tuple[DemoAnswer, list[str]]:
        """Ask, let the tiers come to rest, and tell what is wrong with who served the answer."""
        tier = TierName(name) if name != COLD else TierName.GPU
        before = self._product.hit_tokens(tier)
        answer = self._asked.ask(f"{self._document}\n\n{question}")
        block_tokens = self._product.block_tokens()
        if name == COLD:
            # Here all is stored; later a tier may have no reason to take what it had before.
            self._product.settle(answer.prompt_tokens // block_tokens * block_tokens)
            served = sum(answer.tier_tokens.values())
            return answer, [f"cold: {served} tokens were served by a tier"] if served else []
        self._product.settle(0)
        served = answer.tier_tokens[tier]
        wanted = answer.prompt_tokens - _TAIL_TOKENS_MAX - block_tokens
        if served < wanted:
            return answer, [f"{tier}: served {served} tokens, and should at least {wanted}"]
        if not self._product.counts_hits(tier, before + served):
            return answer, [f"{tier}: the daemon did not count the {served} tokens it served"]
        return answer, []

    @property
    def _asked(self) -> ModelClient:
        assert self._client is not None, "the product is started first"
        return self._client
