"""Asks the same questions with the document in one tier after another, and reports the times.

Rules that make the rows comparable
-----------------------------------
* Every tier above the measured one is emptied before each question. Otherwise only the first
  question would measure it, and the others the GPU.
* The cold pass empties all tiers, so that each of its answers is a reference.
* A pass is represented by the question with the median TTFT, and its token counts.
* A tier has served a prompt if the response says so and the daemon's counters agree.
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
"""Name of the pass without any cache."""

QUESTIONS: Sequence[str] = (
    "What is this document about? Answer in one sentence.",
    "Which problem does this document describe?",
    "What should a newcomer remember from this document?",
)
"""Asked in every pass, in this order."""

_TAIL_TOKENS_MAX = 96
"""Upper bound for a question with its part of the chat template."""

_CHARACTERS_PER_TOKEN_MAX = 8
"""Upper bound in any known language; longer texts cannot fit into the context."""

ANSWER_TOKENS = 16
"""Tokens per answer: enough to see a difference, and quickly generated."""

_TIMEOUT_S = 600.0
"""Enough for a cold prompt of a full context on two busy cores."""

_PLAIN_WIDTH = 100
"""Width of the table in a file; with rich's default of 80 columns, words would be broken."""


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """An answer with its usage counts."""

    text: str
    ttft_s: float
    prompt_tokens: int
    tier_tokens: dict[TierName, int]
    computed_tokens: int


@dataclass(frozen=True, slots=True)
class DemoPass:
    """The answers of one pass in the order of the questions, and its problems."""

    name: str
    answers: tuple[DemoAnswer, ...]
    is_same_as_cold: bool
    problems: tuple[str, ...]

    @property
    def median(self) -> DemoAnswer:
        """Return the answer with the median TTFT."""
        return sorted(self.answers, key=lambda answer: answer.ttft_s)[len(self.answers) // 2]


class ModelClient:
    """Queries the model at a URL as an ordinary user, with the ``openai`` client."""

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
        last = None
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
                    last = chunk
                for choice in chunk.choices:
                    first_s = first_s or time.perf_counter()
                    texts.append(choice.delta.content or "")
        except openai.OpenAIError as error:
            raise DemoFailed(f"the engine did not answer: {error}") from error
        if last is None or last.usage is None or not first_s:
            raise DemoFailed("the response has no usage")
        extension = (last.model_extra or {})["kvtier"]
        return DemoAnswer(
            text="".join(texts),
            ttft_s=first_s - started_s,
            prompt_tokens=last.usage.prompt_tokens,
            tier_tokens={tier: int(extension["tier_tokens"][tier]) for tier in TierName},
            computed_tokens=int(extension["computed_tokens"]),
        )

    def count_tokens(self, content: str) -> int:
        """Return the number of tokens of a message, without computing them.

        Asks for an answer as long as the context: the engine rejects it, with the prompt's length.
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
            raise DemoFailed(f"the engine did not count the tokens: {error}") from error
        except openai.OpenAIError as error:
            raise DemoFailed(f"the engine did not answer: {error}") from error
        raise DemoFailed("the engine accepted a prompt that cannot fit")


@dataclass(slots=True)
class DemoStep:
    """A step in progress; ``result`` is printed with it at the end."""

    result: str = ""


class DemoProgress:
    """Prints steps and results to standard error; as plain lines if it is not a terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._status = self._console.status("")

    def __enter__(self) -> Self:
        self._status.start()  # shows nothing without a terminal
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    @contextmanager
    def step(self, what: str) -> Iterator[DemoStep]:
        """Show a step in progress, and print a line at its end."""
        started_s = time.monotonic()
        self._status.update(what)
        step = DemoStep()
        yield step
        result = step.result or f"{time.monotonic() - started_s:.1f} s"
        self._console.print(f"{what:<52}{result}", soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, soft_wrap=True)


def as_json(passes: Sequence[DemoPass]) -> str:
    """Return the passes as JSON."""
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
    """Print the passes as a table."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    table = Table(
        box=SIMPLE,
        caption=f"Median of {len(passes[0].answers)} questions. Before each one, the tiers above "
        "that of the row were emptied.",
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
    """Measures the tiers of a deployment that is not started yet."""

    def __init__(self, deployment: DemoDeployment, document: str, progress: DemoProgress) -> None:
        self._deployment = deployment
        self._document = document
        self._progress = progress
        self._client: ModelClient | None = None

    def passes(self) -> list[DemoPass]:
        """Start the deployment and run every pass."""
        self._start("starting daemon and engine")
        if not self._deployment.stat()["tiers"][STORE_TIER]["detail"]["direct_io"]:
            self._progress.note("no direct I/O: SSD hits may come from the page cache")
        self._fit()
        cold = self._pass(COLD, self._deployment.tiers, ())
        passes = [cold]
        for number, tier in enumerate(self._deployment.tiers):
            if tier is STORE_TIER:
                self._deployment.drop(TierName.GPU, TierName.CPU)
                self._deployment.stop()
                self._start("restarting daemon and engine")
            passes.append(self._pass(tier, self._deployment.tiers[:number], cold.answers))
        return passes

    def _start(self, what: str) -> None:
        with self._progress.step(what):
            self._deployment.stop()
            self._deployment.start()
            self._client = ModelClient(self._deployment.url)
            # The first request of a process is slower.
            self._client.ask("Say hello.")

    def _fit(self) -> None:
        """Cut the document to the model's context. Raises StartError if it is too short."""
        client = self._asked
        room = client.context_limit - ANSWER_TOKENS - _TAIL_TOKENS_MAX
        text = self._document[: client.context_limit * _CHARACTERS_PER_TOKEN_MAX]
        while (num_tokens := client.count_tokens(text)) > room:
            text = text[: len(text) * room // num_tokens]
        least = _TAIL_TOKENS_MAX + 2 * self._deployment.block_tokens()
        if num_tokens < least:
            raise StartError(
                "--document",
                f"{num_tokens} tokens are too few to be cached",
                f"use a text of at least {least} tokens",
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
                    self._deployment.drop(*emptied)
                answer, problem = self._ask(name, question)
                step.result = f"first token after {answer.ttft_s:.3g} s"
            answers.append(answer)
            problems += problem
        is_same = not cold or [a.text for a in answers] == [a.text for a in cold]
        if not is_same:
            problems.append(f"{name}: an answer differs from the cold pass")
        return DemoPass(name, tuple(answers), is_same, tuple(problems))

    def _ask(self, name: str, question: str) -> tuple[DemoAnswer, list[str]]:
        """Return the answer once all transfers are done, and problems with its origin."""
        tier = TierName(name) if name != COLD else TierName.GPU
        before = self._deployment.hit_tokens(tier)
        answer = self._asked.ask(f"{self._document}\n\n{question}")
        block_tokens = self._deployment.block_tokens()
        if name == COLD:
            # Everything is stored here; later passes store nothing new.
            self._deployment.settle(answer.prompt_tokens // block_tokens * block_tokens)
            served = sum(answer.tier_tokens.values())
            return answer, [f"cold: {served} tokens were served by a tier"] if served else []
        self._deployment.settle(0)
        served = answer.tier_tokens[tier]
        wanted = answer.prompt_tokens - _TAIL_TOKENS_MAX - block_tokens
        if served < wanted:
            return answer, [f"{tier}: served {served} tokens, expected at least {wanted}"]
        if not self._deployment.counts_hits(tier, before + served):
            return answer, [f"{tier}: the daemon did not count the {served} served tokens"]
        return answer, []

    @property
    def _asked(self) -> ModelClient:
        assert self._client is not None, "the deployment was started"
        return self._client
