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

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import openai
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from kvtier.cli.demo.deployment import DemoDeployment, DemoFailed
from kvtier.cli.formatting import format_count, format_seconds
from kvtier.core.tier_registry import STORE_TIER, TierName
from kvtier.errors import StartError

__all__ = [
    "ANSWER_TOKENS",
    "COLD",
    "QUESTIONS",
    "DemoAnswer",
    "DemoPass",
    "DemoProgress",
    "DemoRun",
    "DemoStep",
    "ModelClient",
    "as_json",
    "print_table",
]

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

ANSWER_TOKENS = 16
"""Of each answer: enough to see a difference, few enough to be a short part of the time."""

_TIMEOUT_S = 600.0
"""A cold prompt of a whole context, on a machine of two cores that is busy."""

_PLAIN_WIDTH = 100
"""Of a table that goes into a file, where rich would take 80 columns and break words."""


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """One answer, and the account that came with it."""

    text: str
    ttft_s: float
    prompt_tokens: int
    tier_tokens: dict[TierName, int]
    computed_tokens: int


@dataclass(frozen=True, slots=True)
class DemoPass:
    """One pass: its answers in the order of the questions, and all that was wrong with it."""

    name: str
    answers: tuple[DemoAnswer, ...]
    is_same_as_cold: bool
    problems: tuple[str, ...]

    @property
    def median(self) -> DemoAnswer:
        """Return the answer with the median TTFT."""
        return sorted(self.answers, key=lambda answer: answer.ttft_s)[len(self.answers) // 2]


class ModelClient:
    """Asks the one model that is served at a URL."""

    def __init__(self, url: str) -> None:
        self._client = openai.OpenAI(
            base_url=url, api_key="none", timeout=_TIMEOUT_S, max_retries=0
        )
        (model,) = self._client.models.list().data
        self._model = model.id
        self.context_limit = int((model.model_extra or {})["max_model_len"])

    def ask(self, content: str) -> DemoAnswer:
        """Return the greedy answer to one message."""
        started_s = time.perf_counter()
        first_s = 0.0
        texts: list[str] = []
        account = None
        try:
            stream = self._client.chat.completions.create(
                model=self._model,
                messages=[{"role": "user", "content": content}],
                max_tokens=ANSWER_TOKENS,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
            for chunk in stream:
                if chunk.usage is not None:
                    account = chunk
                for choice in chunk.choices:
                    first_s = first_s or time.perf_counter()
                    texts.append(choice.delta.content or "")
        except openai.OpenAIError as error:
            raise DemoFailed(f"the engine did not answer: {error}") from error
        if account is None or account.usage is None or not first_s:
            raise DemoFailed("the answer came without its account")
        extension = (account.model_extra or {})["kvtier"]
        return DemoAnswer(
            text="".join(texts),
            ttft_s=first_s - started_s,
            prompt_tokens=account.usage.prompt_tokens,
            tier_tokens={tier: int(extension["tier_tokens"][tier]) for tier in TierName},
            computed_tokens=int(extension["computed_tokens"]),
        )

    def count_tokens(self, content: str) -> int:
        """Return how many tokens one message takes, without computing any of them.

        An answer as long as the whole context is always refused, and the refusal counts the prompt.
        """
        try:
            self._client.chat.completions.create(
                model=self._model,
                messages=[{"role": "user", "content": content}],
                max_tokens=self.context_limit,
            )
        except openai.BadRequestError as error:
            if found := re.search(r"(\d+) in the prompt", str(error)):
                return int(found[1])
            raise DemoFailed(f"the engine refused to count: {error}") from error
        except openai.OpenAIError as error:
            raise DemoFailed(f"the engine did not answer: {error}") from error
        raise DemoFailed("the engine took a prompt that cannot fit")


@dataclass(slots=True)
class DemoStep:
    """A step under way; ``result`` is said beside it when it is done."""

    result: str = ""


class DemoProgress:
    """Says what is being done and what came of it; plain lines where there is no terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._status = self._console.status("")

    def __enter__(self) -> Self:
        self._status.start()  # shows nothing where there is no terminal
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    @contextmanager
    def step(self, what: str) -> Iterator[DemoStep]:
        """Show a step while it is being done, and leave a line when it is."""
        started_s = time.monotonic()
        self._status.update(what)
        step = DemoStep()
        yield step
        result = step.result or f"{time.monotonic() - started_s:.1f} s"
        self._console.print(f"{what:<52}{result}", soft_wrap=True)

    def note(self, text: str) -> None:
        """Say something that stays."""
        self._console.print(text, soft_wrap=True)


def as_json(passes: Sequence[DemoPass]) -> str:
    """Return the passes for programs."""
    rows = [
        {
            "name": done.name,
            "ttft_s": round(done.median.ttft_s, 6),
            "prompt_tokens": done.median.prompt_tokens,
            "tier_tokens": done.median.tier_tokens,
            "computed_tokens": done.median.computed_tokens,
            "same_as_cold": done.is_same_as_cold,
        }
        for done in passes
    ]
    return json.dumps({"passes": rows})


def print_table(passes: Sequence[DemoPass]) -> None:
    """Print the passes for people."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    table = Table(
        box=SIMPLE,
        caption=f"Median of {len(passes[0].answers)} questions; before each of them, the tiers "
        "above the one of the row were emptied.",
        caption_justify="left",
    )
    table.add_column("served by")
    for heading in ("TTFT", "speed-up", "prompt", *TierName, "computed", "same answer"):
        table.add_column(heading, justify="right")
    cold_s = passes[0].median.ttft_s
    for done in passes:
        row = done.median
        table.add_row(
            done.name,
            format_seconds(row.ttft_s),
            f"{cold_s / row.ttft_s:.1f} x",
            format_count(row.prompt_tokens),
            *(format_count(row.tier_tokens[tier]) for tier in TierName),
            format_count(row.computed_tokens),
            "reference" if done is passes[0] else "yes" if done.is_same_as_cold else "NO",
        )
    console.print(table)


class DemoRun:
    """Leads through the tiers of a product that is not started yet."""

    def __init__(self, product: DemoDeployment, document: str, progress: DemoProgress) -> None:
        self._product = product
        self._document = document
        self._progress = progress
        self._client: ModelClient | None = None

    def passes(self) -> list[DemoPass]:
        """Start the product and make every pass."""
        self._start("starting the daemon and the engine")
        if not self._product.stat()["tiers"][STORE_TIER]["detail"]["direct_io"]:
            self._progress.note("no direct I/O here: SSD hits may come from the page cache")
        self._fit()
        cold = self._pass(COLD, self._product.tiers, ())
        passes = [cold]
        for number, tier in enumerate(self._product.tiers):
            if tier is STORE_TIER:
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

    def _pass(self, name: str, emptied: Sequence[TierName], cold: Sequence[DemoAnswer]) -> DemoPass:
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
        return DemoPass(name, tuple(answers), is_same, tuple(problems))

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
