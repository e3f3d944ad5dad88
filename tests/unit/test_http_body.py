import json

import pytest

from kvtier.api.http.engine_call import read_chat, read_completion
from kvtier.api.http.errors import ApiError
from kvtier.api.http.request_body import ChatBody, CompletionBody, parse_body
from kvtier.engine.chat_template import MessageRefused
from kvtier.testing.engine_service import ByteChatModel
from kvtier.wire.convert import traits_fault

MODEL = ByteChatModel()


def completion(**fields: object) -> CompletionBody:
    body = {"model": "byte-model", "prompt": "hi", **fields}
    return parse_body(json.dumps(body).encode(), CompletionBody)


def chat(**fields: object) -> ChatBody:
    body = {"model": "byte-model", "messages": [{"role": "user", "content": "hi"}], **fields}
    return parse_body(json.dumps(body).encode(), ChatBody)


def refusal(make, **fields: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        make(**fields)
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("hi", [(104, 105)]),
        (["hi", "€"], [(104, 105), (226, 130, 172)]),
        ([104, 105], [(104, 105)]),
        ([[104], [105, 256]], [(104,), (105, 256)]),
    ],
)
def test_the_four_forms_of_a_prompt(prompt, tokens):
    call = read_completion(completion(prompt=prompt), MODEL)
    assert [request.prompt for request in call.requests] == tokens
    assert len({request.request_id for request in call.requests}) == len(tokens)


@pytest.mark.parametrize(
    "prompt",
    ["", [], [""], [[]], ["a", ""], None, 7, {}, [True], [1.5], ["a", 1], [[1], "a"], [[[1]]]],
)
def test_a_prompt_of_another_form_is_refused(prompt):
    assert refusal(completion, prompt=prompt).param == "prompt"


@pytest.mark.parametrize("token_id", [-1, 257, 10**30])
def test_a_token_outside_the_vocabulary_is_refused(token_id):
    with pytest.raises(ApiError, match=f"token id {token_id} .* 256") as caught:
        read_completion(completion(prompt=[1, token_id]), MODEL)
    assert caught.value.param == "prompt"


def test_defaults_are_those_of_openai():
    request = read_completion(completion(), MODEL).requests[0]
    assert request.max_tokens == 16
    assert request.sampling.temperature == 1.0
    assert request.sampling.top_p == 1.0
    assert (request.sampling.top_k, request.sampling.seed) == (0, None)
    assert not request.sampling.ignore_eos
    assert (request.cache_salt, request.max_offload_tokens, request.max_load_tokens) == (None,) * 3
    told = read_chat(chat(), MODEL).requests[0]
    assert told.max_tokens == MODEL.context_limit - len(told.prompt)


def test_every_parameter_reaches_the_engine():
    body = completion(
        max_tokens=5,
        temperature=0,
        top_p=0.5,
        top_k=40,
        seed=7,
        ignore_eos=True,
        cache_salt="salt",
        kv_transfer_params={"max_offload_tokens": 0, "max_load_tokens": 64},
        stop="END",
        stream=True,
        stream_options={"include_usage": True},
    )
    call = read_completion(body, MODEL)
    request = call.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 0.5, 40)
    assert (sampling.seed, sampling.ignore_eos) == (7, True)
    assert (request.max_tokens, request.cache_salt) == (5, "salt")
    assert (request.max_offload_tokens, request.max_load_tokens) == (0, 64)
    assert (call.stops, call.is_stream, call.has_usage_chunk) == (("END",), True, True)
    assert request.stop_ids == frozenset()


def test_a_stop_that_is_a_special_token_stops_at_it():
    (request,) = read_completion(completion(stop=["END", "<end>"]), MODEL).requests
    assert request.stop_ids == {MODEL.special_tokens["<end>"]}


def test_null_means_left_out():
    names = [name for name in CompletionBody.model_fields if name not in {"model", "prompt"}]
    nulls = dict.fromkeys([*names, "logprobs", "suffix", "n", "tools", "response_format"])
    body = read_completion(completion(**nulls), MODEL)
    assert body.requests[0].max_tokens == 16


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("user", "me"),
        ("metadata", {"a": "b"}),
        ("store", True),
        ("service_tier", "auto"),
        ("n", 1),
        ("logprobs", False),
        ("logit_bias", {}),
        ("tools", []),
        ("tool_choice", "none"),
        ("response_format", {"type": "text"}),
        ("best_of", 1),
        ("echo", False),
        ("suffix", ""),
        ("presence_penalty", 0),
        ("presence_penalty", 0.0),
        ("frequency_penalty", 0),
        ("parallel_tool_calls", True),
        ("safety_identifier", "x"),
        ("prompt_cache_key", "x"),
    ],
)
@pytest.mark.parametrize("make", [completion, chat])
def test_what_changes_nothing_is_accepted(make, name, value):
    make(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("logprobs", True),
        ("logprobs", 0),
        ("logprobs", 5),
        ("top_logprobs", 2),
        ("logit_bias", {"5": 1}),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("best_of", 3),
        ("echo", True),
        ("suffix", "x"),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("n", True),
        ("reasoning_effort", "high"),
        ("min_p", 0.1),
        ("repetition_penalty", 1.1),
        ("temprature", 0),
        ("audio", {}),
        ("modalities", ["audio"]),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("seed", 2**63),
        ("seed", "7"),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("stop", ""),
        ("stop", ["a"] * 5),
        ("stop", "x" * 2000),
        ("stop", 7),
        ("stream", "yes"),
        ("ignore_eos", 1),
        ("cache_salt", ""),
        ("cache_salt", 5),
        ("stream_options", True),
        ("stream_options", {"include_usage": True}),
        ("kv_transfer_params", []),
    ],
)
@pytest.mark.parametrize("make", [completion, chat])
def test_what_cannot_be_honoured_is_refused_by_name(make, name, value):
    error = refusal(make, **{name: value})
    assert error.status == 400
    assert error.param is not None
    assert error.param.split("[")[0] == name
    assert name in error.message


@pytest.mark.parametrize(
    ("transfer", "param"),
    [
        ({"max_offload_tokens": -1}, "kv_transfer_params.max_offload_tokens"),
        ({"max_load_tokens": "5"}, "kv_transfer_params.max_load_tokens"),
        ({"max_load_tokens": True}, "kv_transfer_params.max_load_tokens"),
        ({"remote_host": "x"}, "kv_transfer_params.remote_host"),
        ({"continues": 1.5}, "kv_transfer_params.continues"),
        ({"continues": "yes"}, "kv_transfer_params.continues"),
        ({"continues": []}, "kv_transfer_params.continues"),
        ({"final": 1}, "kv_transfer_params.final"),
        ({"final": True, "continues": False}, "kv_transfer_params"),
        ({"expected_gap_s": -1}, "kv_transfer_params.expected_gap_s"),
        ({"expected_gap_s": 1e9}, "kv_transfer_params.expected_gap_s"),
        ({"kind": "two words"}, "kv_transfer_params.kind"),
        ({"kind": "x" * 33}, "kv_transfer_params.kind"),
        ({"kind": ""}, "kv_transfer_params.kind"),
        ({"priority": -1}, "kv_transfer_params.priority"),
        ({"priority": 1001}, "kv_transfer_params.priority"),
        ({"priority": True}, "kv_transfer_params.priority"),
        ({"ttl_s": "60"}, "kv_transfer_params.ttl_s"),
    ],
)
def test_transfer_parameters_are_checked_one_by_one(transfer, param):
    assert refusal(completion, kv_transfer_params=transfer).param == param


@pytest.mark.parametrize(
    ("said", "continues"),
    [
        ({"continues": True}, 1.0),
        ({"continues": False}, 0.0),
        ({"continues": 0.25}, 0.25),
        ({"final": True}, 0.0),
        ({"final": False}, 1.0),
        ({"continues": None, "final": None}, None),
        ({}, None),
    ],
)
def test_whether_it_continues_may_be_said_in_two_ways(said, continues):
    call = read_completion(completion(kv_transfer_params=said), MODEL)
    assert call.requests[0].traits().continues == continues


def test_hints_reach_the_traits_of_each_request():
    transfer = {"kind": "agent", "expected_gap_s": 2, "priority": 3, "ttl_s": 60.5}
    transfer |= {"max_offload_tokens": 128}
    call = read_chat(chat(kv_transfer_params=transfer), MODEL)
    traits = call.requests[0].traits()
    assert (traits.kind, traits.gap_s, traits.priority, traits.ttl_s) == ("agent", 2.0, 3, 60.5)
    assert traits.max_offload_tokens == 128
    assert traits_fault(traits) == "", "what is let in here can be sent"


def test_the_context_limit_says_both_numbers():
    with pytest.raises(ApiError, match=r"2048 tokens.* 2048 in the prompt") as caught:
        read_completion(completion(prompt="x" * 2048), MODEL)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(ApiError, match=r"2048 tokens.* 2000 in the prompt and 49 to generate"):
        read_completion(completion(prompt="x" * 2000, max_tokens=49), MODEL)
    edge = read_completion(completion(prompt="x" * 2000, max_tokens=48), MODEL)
    assert edge.requests[0].max_tokens == 48
    near = read_completion(completion(prompt="x" * 2040), MODEL)
    assert near.requests[0].max_tokens == 8, "only the default gives way"


class NeverEncodes(ByteChatModel):
    def encode(self, text: str) -> list[int]:
        raise AssertionError(f"{len(text)} characters need no tokenizer")


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized():
    text = "x" * (MODEL.context_limit + 1)
    with pytest.raises(ApiError, match="2048 tokens, but the text has 2049 characters") as caught:
        read_completion(completion(prompt=text), NeverEncodes())
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


def test_a_conversation_that_cannot_fit_is_refused_before_it_is_tokenized():
    messages = [{"role": "user", "content": "x" * length} for length in (1000, 1049)]
    with pytest.raises(ApiError, match="2048 tokens, but the text has 2049 characters") as caught:
        read_chat(chat(messages=messages), NeverEncodes())
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")


def test_another_model_is_not_found():
    with pytest.raises(ApiError, match="gpt-4") as caught:
        read_chat(chat(model="gpt-4"), MODEL)
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    assert caught.value.param == "model"


def test_content_is_text_or_parts_of_text():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = chat(messages=[{"role": "user", "content": parts, "name": "Ada"}])
    assert body.messages[0].for_template == {"role": "user", "content": "one\ntwo", "name": "Ada"}


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, "content", "image_url"),
        ({"role": "user", "content": [{"text": "x"}]}, "content", "type"),
        ({"role": "user", "content": [{"type": "text"}]}, "content", "text"),
        ({"role": "user", "content": 5}, "content", "string"),
        ({"role": "user", "content": None}, "content", "string"),
        ({"role": "user"}, "content", "is required"),
        ({"content": "x"}, "role", "is required"),
        ({"role": "", "content": "x"}, "role", "character"),
        ({"role": "user", "content": "x", "tool_calls": [{}]}, "tool_calls", "not supported"),
    ],
)
def test_a_message_of_another_form_is_refused(message, param, words):
    error = refusal(chat, messages=[{"role": "user", "content": "x"}, message])
    assert error.param == f"messages[1].{param}"
    assert words in error.message


def test_an_answer_can_be_sent_back_as_it_came():
    answer = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "tool_calls": None,
        "audio": None,
        "annotations": [],
    }
    assert chat(messages=[answer]).messages[0].for_template == {
        "role": "assistant",
        "content": "hi",
    }


def test_a_message_that_cannot_be_shown_is_named():
    class Refuses(ByteChatModel):
        def apply_chat_template(self, messages):
            raise MessageRefused("messages[1].role", "no such role", "use user")

    with pytest.raises(ApiError) as caught:
        read_chat(chat(), Refuses())
    assert caught.value.param == "messages[1].role"
    assert caught.value.message == "messages[1].role: no such role; use user"


def test_a_template_may_refuse():
    with pytest.raises(ApiError, match="unknown role wizard") as caught:
        read_chat(chat(messages=[{"role": "wizard", "content": "x"}]), MODEL)
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 5000, b'{"temperature": NaN}', b"null"]
)
def test_what_is_no_json_object_is_refused(raw):
    with pytest.raises(ApiError) as caught:
        parse_body(raw, CompletionBody)
    assert caught.value.status == 400


def test_infinity_is_no_temperature():
    raw = b'{"model": "byte-model", "prompt": "x", "temperature": 1e999}'
    with pytest.raises(ApiError) as caught:
        parse_body(raw, CompletionBody)
    assert caught.value.param == "temperature"
