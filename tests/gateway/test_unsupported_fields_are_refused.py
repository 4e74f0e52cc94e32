"""A field whose value would change the answer is refused by name, never ignored (R34, R41)."""

from __future__ import annotations

import pytest
from openai.types import completion_create_params
from openai.types.chat import ChatCompletionStreamOptionsParam
from openai.types.chat import completion_create_params as chat_create_params

from baton_worker.gateway.errors import ApiError
from baton_worker.gateway.intake.schema import ChatBody, CompletionBody, TokenizeBody
from baton_worker.gateway.intake.unsupported import (
    HARMLESS,
    NEUTRAL,
    NEUTRAL_AT,
    OF_THE_OTHER,
    refuse_other_tokens,
    refuse_unsupported,
)
from baton_worker.gateway.request import Endpoint

BODIES = {Endpoint.CHAT: ChatBody, Endpoint.COMPLETION: CompletionBody}
OPENAI = {
    Endpoint.CHAT: chat_create_params.CompletionCreateParamsBase.__annotations__,
    Endpoint.COMPLETION: completion_create_params.CompletionCreateParamsBase.__annotations__,
}
VLLM = [
    "add_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "best_of",
    "cache_salt",
    "ec_transfer_params",
    "echo",
    "guided_choice",
    "guided_decoding_backend",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "guided_whitespace_pattern",
    "ignore_eos",
    "include_stop_str_in_output",
    "kv_transfer_params",
    "length_penalty",
    "logits_processors",
    "logprob_token_ids",
    "min_p",
    "min_tokens",
    "priority",
    "prompt_logprobs",
    "repetition_detection",
    "repetition_penalty",
    "request_id",
    "response_format",
    "return_mm_kwargs",
    "return_token_ids",
    "return_token_offsets",
    "return_tokens_as_token_ids",
    "routed_experts_prompt_start",
    "session_id",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop_token_ids",
    "stream",
    "stream_interval",
    "structural_tag",
    "structured_outputs",
    "thinking_token_budget",
    "top_k",
    "truncate_prompt_tokens",
    "truncation_side",
    "use_beam_search",
    "vllm_xargs",
    "watermarking",
]
VLLM_AT = {
    Endpoint.CHAT: [
        "add_generation_prompt",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "include_reasoning",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "reasoning_effort",
        "return_prompt_text",
    ],
    Endpoint.COMPLETION: ["prompt_embeds", "suffix"],
}
SGLANG = [
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "cache_salt",
    "custom_labels",
    "custom_logit_processor",
    "custom_params",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
    "ebnf",
    "extra_key",
    "ignore_eos",
    "images_config",
    "lora_path",
    "min_p",
    "min_tokens",
    "ngram_corpus_id",
    "no_stop_trim",
    "priority",
    "regex",
    "repetition_penalty",
    "return_cached_tokens_details",
    "return_hidden_states",
    "return_routed_experts",
    "return_token_ids",
    "rid",
    "routed_dp_rank",
    "routed_experts_start_len",
    "session_id",
    "session_params",
    "skip_special_tokens",
    "stop_regex",
    "stop_token_ids",
    "top_k",
]
SGLANG_AT = {
    Endpoint.CHAT: [
        "chat_template_kwargs",
        "continue_final_message",
        "input_ids",
        "max_dynamic_patch",
        "min_dynamic_patch",
        "reasoning",
        "return_meta_info",
        "return_prompt_token_ids",
        "separate_reasoning",
        "stream_reasoning",
        "task",
        "use_audio_in_video",
    ],
    Endpoint.COMPLETION: ["json_schema"],
}
FASTDEPLOY = [
    "bad_words_token_ids",
    "chat_template_kwargs",
    "collect_metrics",
    "completion_token_ids",
    "disable_chat_template",
    "disaggregate_info",
    "include_draft_logprobs",
    "include_logprobs_decode_token",
    "logits_processors_args",
    "max_streaming_response_tokens",
    "mm_hashes",
    "prompt_token_ids",
    "reasoning_max_tokens",
    "response_max_tokens",
    "temp_scaled_logprobs",
    "top_p_normalized_logprobs",
    "trace_context",
]
OF_HOSTED_SERVERS = ["enable_thinking", "thinking", "thinking_budget"]
VLLM_TOKENIZE = {
    "add_generation_prompt",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "media_io_kwargs",
    "messages",
    "mm_processor_kwargs",
    "model",
    "prompt",
    "reasoning_effort",
    "return_token_strs",
    "tools",
    "truncate_prompt_tokens",
}
"""Of vLLM's own, and of a chat's what its prompt depends on."""
OF_ITSELF = {"best_of"}


def known(endpoint):
    """Every field that the gateway honours, refuses or knows to be harmless."""
    honoured = set(BODIES[endpoint].__struct_fields__)
    refused = NEUTRAL.keys() | NEUTRAL_AT[endpoint].keys() | OF_THE_OTHER[endpoint].keys()
    return honoured | refused | HARMLESS | OF_ITSELF


@pytest.mark.parametrize("endpoint", Endpoint)
def test_every_field_of_openai_and_vllm_is_honoured_refused_or_harmless(endpoint):
    asked = {*OPENAI[endpoint], *VLLM, *VLLM_AT[endpoint]}
    assert asked - known(endpoint) == set()


@pytest.mark.parametrize("endpoint", Endpoint)
def test_every_field_of_the_servers_that_users_come_from_is_known_too(endpoint):
    asked = {*SGLANG, *SGLANG_AT[endpoint], *OF_HOSTED_SERVERS}
    assert asked - known(endpoint) == set()
    of_chats = {"chat_template_kwargs"} if endpoint is Endpoint.COMPLETION else set()
    assert set(FASTDEPLOY) - known(endpoint) == of_chats


@pytest.mark.parametrize(
    ("body", "instead"),
    [
        ({"enable_thinking": False}, "chat_template_kwargs"),
        ({"thinking": {"type": "disabled"}}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "/v1/completions"),
        ({"messages": [{"role": "assistant", "content": "a", "prefix": True}]}, "/tokenize"),
        ({"input_ids": [1]}, "prompt of /v1/completions"),
        ({"extra_key": "a"}, "cache_salt"),
    ],
)
def test_what_can_be_had_otherwise_is_refused_with_how(body, instead):
    assert instead in refusal(Endpoint.CHAT, **body).message


@pytest.mark.parametrize("endpoint", Endpoint)
def test_no_field_is_two_of_these_at_once(endpoint):
    honoured = set(BODIES[endpoint].__struct_fields__)
    refused = NEUTRAL.keys() | NEUTRAL_AT[endpoint].keys() | OF_THE_OTHER[endpoint].keys()
    assert honoured & (NEUTRAL.keys() | OF_THE_OTHER[endpoint].keys()) == set()
    assert HARMLESS & (honoured | refused) == set()


def refusal(endpoint, **body):
    with pytest.raises(ApiError) as refused:
        refuse_unsupported(endpoint, {"model": "tiny"} | body)
    assert refused.value.status == 400
    return refused.value


@pytest.mark.parametrize("endpoint", Endpoint)
@pytest.mark.parametrize("name", NEUTRAL)
def test_a_value_that_asks_for_something_is_refused_by_name(endpoint, name):
    for value in ("something", {"type": "something"}, [{"a": 1}], 7):
        assert refusal(endpoint, **{name: value}).param == name


@pytest.mark.parametrize("name", ["tools", "tool_choice"])
def test_a_completion_has_no_template_that_would_show_tools(name):
    assert refusal(Endpoint.COMPLETION, **{name: ["something"]}).param == name
    refuse_unsupported(Endpoint.CHAT, {name: ["something"]})


@pytest.mark.parametrize("endpoint", Endpoint)
def test_a_value_that_asks_for_nothing_is_taken(endpoint):
    for name, values in NEUTRAL.items():
        for value in values:
            refuse_unsupported(endpoint, {name: value})
    refuse_unsupported(endpoint, dict.fromkeys(HARMLESS, "whatever"))


@pytest.mark.parametrize(
    "body",
    [
        {"reasoning_effort": "high"},
        {"reasoning_effort": "none"},
        {"prediction": {"type": "content", "content": "x"}},
        {"add_special_tokens": True},
        {"spaces_between_special_tokens": False},
        {"include_reasoning": False},
    ],
)
def test_what_was_once_ignored_in_a_chat_is_refused(body):
    (name,) = body
    assert refusal(Endpoint.CHAT, **body).param == name


@pytest.mark.parametrize(
    "name", ["prediction", "response_format", "structured_outputs", "guided_json", "audio"]
)
def test_an_empty_object_is_no_absent_one(name):
    assert refusal(Endpoint.CHAT, **{name: {}}).param == name
    refuse_unsupported(Endpoint.CHAT, {name: None})


def test_null_within_an_object_asks_for_nothing():
    """Clients that write all fields of their types send it."""
    refuse_unsupported(Endpoint.CHAT, {"response_format": {"type": "text", "json_schema": None}})
    for value in ({"type": None}, {"type": "json_schema", "json_schema": None}):
        assert refusal(Endpoint.CHAT, response_format=value).param == "response_format"


def test_special_tokens_are_a_completions_own_choice():
    for value in (True, False, None):
        refuse_unsupported(Endpoint.COMPLETION, {"add_special_tokens": value})


@pytest.mark.parametrize(
    "name", ["audio", "function_call", "partial", "prefix", "refusal", "tools"]
)
def test_a_part_of_a_conversation_that_no_template_is_given_is_refused(name):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", name: [{"id": "x"}]}]
    assert refusal(Endpoint.CHAT, messages=messages).param == f"messages[1].{name}"
    messages[1][name] = None
    refuse_unsupported(Endpoint.CHAT, {"messages": messages})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chat_template", "{{ 1 }}"),
        ("continue_final_message", True),
        ("disable_chat_template", True),
        ("enable_thinking", False),
        ("input_ids", [1]),
        ("prompt_token_ids", [1]),
        ("task", "title"),
        ("thinking", {"type": "disabled"}),
        ("documents", [{"text": "a"}]),
        ("reasoning_effort", "high"),
        ("return_token_strs", True),
        ("truncate_prompt_tokens", 1),
        ("functions", [{"name": "f"}]),
        ("reasoning", {"effort": "high"}),
        ("messages[0].refusal", "no"),
        ("messages[0].prefix", True),
    ],
)
def test_what_would_make_other_tokens_is_refused_where_they_are_told(field, value):
    def body(value):
        if "." not in field:
            return {field: value}
        return {"messages": [{"role": "assistant", field.rpartition(".")[2]: value}]}

    with pytest.raises(ApiError) as refused:
        refuse_other_tokens(body(value))
    assert (refused.value.status, refused.value.param) == (400, field)
    refuse_other_tokens(body(None))
    refuse_other_tokens({"temperature": 0, "response_format": {"type": "json_object"}})


def test_every_field_of_vllms_tokenize_is_honoured_or_refused():
    """What it has of an output's form is left alone: a chat's body may be sent there as it is."""
    for name in VLLM_TOKENIZE - set(TokenizeBody.__struct_fields__):
        with pytest.raises(ApiError, match=name):
            refuse_other_tokens({name: ["something"]})


def test_stream_options_are_known_too():
    assert set(ChatCompletionStreamOptionsParam.__annotations__) == {
        "include_usage", "include_obfuscation",
    }  # fmt: skip
    refuse_unsupported(Endpoint.CHAT, {"stream_options": {"include_obfuscation": False}})


@pytest.mark.parametrize("body", [{"messages": 3}, {"messages": [3]}, {"stream_options": 3}])
def test_what_is_of_no_use_here_is_left_to_the_types(body):
    refuse_unsupported(Endpoint.CHAT, body)
