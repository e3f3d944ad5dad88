"""An ordinary user of the API: the ``openai`` client, streaming, at temperature 0."""

import re
import time
from dataclasses import dataclass

import openai

from kvtier.cli.demo.product import DemoFailed
from kvtier.core.residency import TierName

__all__ = ["ANSWER_TOKENS", "DemoAnswer", "ModelClient"]

ANSWER_TOKENS = 16
"""Of each answer: enough to see a difference, few enough to be a short part of the time."""

_TIMEOUT_S = 600.0
"""A cold prompt of a whole context, on a machine of two cores that is busy."""


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """One answer, and the account that came with it."""

    text: str
    ttft_s: float
    prompt_tokens: int
    tier_tokens: dict[TierName, int]
    computed_tokens: int


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
