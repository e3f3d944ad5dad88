"""The server as the real OpenAI client sees it."""

from collections import Counter
from collections.abc import Iterator

import openai
import pytest
from prometheus_client import CollectorRegistry

from kvtier.api.http.app import create_app
from kvtier.api.http.server import serve
from kvtier.core.residency import TierName
from kvtier.engine.request import EngineRequest, FinishReason
from kvtier.testing.engine_service import ByteChatModel, FakeEngineService, ScriptedAnswer

TIERS = Counter({TierName.GPU: 1, TierName.CPU: 2, TierName.SSD: 3, TierName.REMOTE: 4})
ANSWER = " Grüße, 東京 😀!"
"""Includes the leading space, which the model's decoder strips at the start of a text."""


def script(request: EngineRequest) -> ScriptedAnswer:
    """Serve a prompt that is long enough from every tier; refuse to say anything about errors."""
    prompt = bytes(token for token in request.prompt if token < 256)
    if b"fail" in prompt:
        return ScriptedAnswer(tuple(b"half"), finish=FinishReason.ERROR, error="Traceback: secret")
    tiers = TIERS if len(prompt) > TIERS.total() else Counter()
    decision = "loaded" if tiers else "computed:too_short"
    return ScriptedAnswer((*ANSWER.encode(), 256), tiers, decision)


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with FakeEngineService(script) as engine:
        app = create_app(engine, ByteChatModel(), registry=CollectorRegistry())
        with (
            serve(app, "127.0.0.1", 0) as server,
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        ):
            yield client


LONG = "a prompt that is long enough"
CHAT = [{"role": "user", "content": LONG}]


def check_account(answer, num_prompt: int) -> None:
    usage = answer.usage
    assert usage.prompt_tokens == num_prompt
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    account = answer.model_extra["kvtier"]
    assert set(account) == {"tier_tokens", "computed_tokens", "decision"}
    assert usage.prompt_tokens_details.cached_tokens == sum(account["tier_tokens"].values())
    assert usage.prompt_tokens == sum(account["tier_tokens"].values()) + account["computed_tokens"]


def test_a_completion(client):
    answer = client.completions.create(model="byte-model", prompt=LONG, max_tokens=100)
    assert answer.object == "text_completion"
    assert answer.model == "byte-model"
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [(0, ANSWER, "stop")]
    check_account(answer, len(LONG))
    assert answer.usage.prompt_tokens_details.cached_tokens == 10
    assert answer.model_extra["kvtier"] == {
        "tier_tokens": {"gpu": 1, "cpu": 2, "ssd": 3, "remote": 4},
        "computed_tokens": len(LONG) - 10,
        "decision": "loaded",
    }


def test_cached_tokens_are_there_when_there_are_none(client):
    answer = client.completions.create(model="byte-model", prompt="hi", max_tokens=1)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.choices[0].finish_reason == "length"
    check_account(answer, 2)


def test_several_prompts_are_one_answer(client):
    prompts = [LONG, "hi", LONG]
    answer = client.completions.create(model="byte-model", prompt=prompts, max_tokens=100)
    assert [(c.index, c.text) for c in answer.choices] == [(i, ANSWER) for i in range(3)]
    check_account(answer, 2 * len(LONG) + 2)
    assert answer.model_extra["kvtier"]["decision"] == "loaded,computed:too_short"


def test_token_ids_are_a_prompt(client):
    answer = client.completions.create(
        model="byte-model", prompt=list(LONG.encode()), max_tokens=100
    )
    assert answer.choices[0].text == ANSWER


def test_a_stream_of_completions(client):
    with client.completions.create(
        model="byte-model",
        prompt=[LONG, "hi"],
        max_tokens=100,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        *chunks, last = stream
    for index in range(2):
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(choice.text for choice in choices) == ANSWER
        assert [choice.finish_reason for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1].finish_reason == "stop"
    assert all(chunk.usage is None and "kvtier" not in chunk.model_extra for chunk in chunks)
    assert not any("\ufffd" in chunk.choices[0].text for chunk in chunks)
    assert last.choices == []
    assert len({chunk.id for chunk in [*chunks, last]}) == 1
    check_account(last, len(LONG) + 2)


def test_a_chat(client):
    answer = client.chat.completions.create(model="byte-model", messages=CHAT)
    assert answer.object == "chat.completion"
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", ANSWER)
    assert answer.choices[0].finish_reason == "stop"
    check_account(answer, len(f"user: {LONG}\nassistant: "))
    again = [*CHAT, message.model_dump(), {"role": "user", "content": "and?"}]
    assert client.chat.completions.create(model="byte-model", messages=again).choices


def test_a_stream_of_chat(client):
    *chunks, last = client.chat.completions.create(
        model="byte-model", messages=CHAT, stream=True, stream_options={"include_usage": True}
    )
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert "".join(delta.content or "" for delta in deltas) == ANSWER
    assert deltas[0].content, "the first chunk comes with the first text"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.choices == []
    check_account(last, len(f"user: {LONG}\nassistant: "))


def test_without_include_usage_a_stream_has_no_account(client):
    chunks = list(client.chat.completions.create(model="byte-model", messages=CHAT, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert not any("kvtier" in chunk.model_extra for chunk in chunks)
    assert not any("usage" in chunk.model_fields_set for chunk in chunks)


@pytest.mark.parametrize("is_stream", [False, True])
def test_extensions_are_taken(client, is_stream):
    answer = client.completions.create(
        model="byte-model",
        prompt=LONG,
        stream=is_stream,
        extra_body={
            "cache_salt": "tenant",
            "kv_transfer_params": {"max_offload_tokens": 0, "max_load_tokens": 128},
            "top_k": 5,
            "ignore_eos": True,
        },
    )
    assert list(answer)


def test_models(client):
    models = client.models.list()
    assert [model.id for model in models] == ["byte-model"]
    assert models.data[0].object == "model"


@pytest.mark.parametrize(
    ("fields", "kind", "param", "code"),
    [
        ({"model": "other"}, openai.NotFoundError, "model", "model_not_found"),
        ({"prompt": "x" * 5000}, openai.BadRequestError, "prompt", "context_length_exceeded"),
        ({"prompt": ""}, openai.BadRequestError, "prompt", None),
        ({"prompt": [999]}, openai.BadRequestError, "prompt", None),
        ({"n": 2}, openai.BadRequestError, "n", None),
        ({"temperature": 3}, openai.BadRequestError, "temperature", None),
        ({"stop": ["a"] * 5}, openai.BadRequestError, "stop", None),
        ({"prompt": "fail"}, openai.InternalServerError, None, "internal_error"),
    ],
)
def test_errors_are_the_ones_the_client_knows(client, fields, kind, param, code):
    with pytest.raises(kind) as caught:
        client.completions.create(**({"model": "byte-model", "prompt": "hi"} | fields))
    assert (caught.value.param, caught.value.code) == (param, code)
    assert "secret" not in str(caught.value)


def test_a_failure_in_a_stream_raises_in_the_client(client):
    stream = client.completions.create(model="byte-model", prompt="fail", stream=True)
    with pytest.raises(openai.APIError, match="internal error") as caught:
        list(stream)
    assert caught.value.code == "internal_error"
    assert "secret" not in str(caught.value)
