"""Every bad request gets OpenAI's error shape with its field, before a worker is touched."""

import pytest

from baton_worker.gateway.errors import ApiError
from baton_worker.gateway.intake.schema import decode_object
from baton_worker.gateway.intake.validate import MAX_PROMPT_LOGPROBS
from baton_worker.gateway.request import Endpoint, GenerationRequest
from baton_worker.gateway.text.tokenizer import GatewayTokenizer
from baton_worker.messages import Submit
from baton_worker.sampling import RequestParams, SamplingParams

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "tiny", "prompt": "hi"}
BAD_ANYWHERE = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 600}, "max_tokens"),
    ({"max_tokens": "7"}, "max_tokens"),
    ({"min_tokens": 50, "max_tokens": 5}, "min_tokens"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 1 << 64}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] + [f"s{i}" for i in range(20)]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [512]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": "yes"}, "stream"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"512": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 100.5}}, "logit_bias"),
    ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
    ({"logit_bias": {"4": 1, "5": "much"}}, "logit_bias[5]"),
    ({"logit_bias": {"k" * 99: True}}, f"logit_bias[{'k' * 40}]"),
    ({"stop": {"5": "much"}}, "stop"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"bad_words": "damn"}, "bad_words"),
    ({"bad_words": [" "]}, "bad_words"),
    ({"bad_words": ["x" * 257]}, "bad_words"),
    ({"bad_words": [f"w{i}" for i in range(257)]}, "bad_words"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"priority": 1001}, "priority"),
    ({"priority": "high"}, "priority"),
    ({"best_of": 3}, "best_of"),
    ({"best_of": True}, "best_of"),
    ({"best_of": 2.5, "n": 2}, "best_of"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"guided_json": {"type": "object"}}, "guided_json"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"temp_scaled_logprobs": 1}, "temp_scaled_logprobs"),
    ({"logprobs_mode": ""}, "logprobs_mode"),
]
BAD_CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "a " * 600}]}, "messages"),
    (
        {"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]},
        "messages",
    ),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": {"type": "function"}}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].function",
    ),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"type": "x", "function": {"name": "f"}}]}
            ]
        },
        "messages[0].tool_calls[0].type",
    ),
    ({"messages": [{"role": "tool", "tool_call_id": "a"}]}, "messages[0].content"),
    (
        {
            "messages": [
                {"role": "assistant", "content": "", "reasoning": "a", "reasoning_content": "b"}
            ]
        },
        "messages[0].reasoning",
    ),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 10_000}, "max_completion_tokens"),
    ({"echo": True}, "echo"),
    ({"prompt": "hi"}, "prompt"),
]
BAD_COMPLETION = [
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [512]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [[5], [600]]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": [7] * 512}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"echo": "yes"}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"max_completion_tokens": 50}, "max_completion_tokens"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
]


@pytest.fixture
def gateway(start_gateway):
    return start_gateway()


@pytest.mark.parametrize(
    ("path", "base", "cases"),
    [
        ("/v1/chat/completions", CHAT, BAD_ANYWHERE + BAD_CHAT),
        ("/v1/completions", TEXT, BAD_ANYWHERE + BAD_COMPLETION),
    ],
    ids=["chat", "completions"],
)
def test_each_bad_field_is_named(gateway, path, base, cases):
    with gateway.http() as client:
        for change, param in cases:
            answer = client.post(path, json=base | change)
            assert answer.status_code == 400, (change, answer.text)
            error = answer.json()["error"]
            assert error["param"] == param, (change, error)
            assert error["type"] == "invalid_request_error"
            assert set(error) == {"message", "type", "param", "code"}
    assert gateway.link.commands == []


@pytest.mark.parametrize(
    ("path", "change", "field"),
    [
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ("/v1/completions", TEXT | {"logprobs": -1}, "logprobs"),
    ],
)
def test_no_bound_is_told_that_the_next_answer_takes_back(gateway, path, change, field):
    with gateway.http() as client:
        error = client.post(path, json=change).json()["error"]
    assert error["message"] == f"{field} is -1: the least is 0"


def test_a_missing_field_is_named(gateway):
    with gateway.http() as client:
        answer = client.post("/v1/chat/completions", json={"model": "tiny"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
        answer = client.post("/v1/completions", json={"model": "tiny"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
        assert answer.json()["error"]["message"] == "prompt is missing"


NO_JSON_OBJECTS = [
    b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"a": NaN}', b'{"a": "\xff"}', b'{"\xe4": 1}',
    b'{"a": "\\ud800"}', b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"a": ' + b'{"b": ' * 60_000 + b"1" + b"}" * 60_001,
]  # fmt: skip


@pytest.mark.parametrize("body", NO_JSON_OBJECTS, ids=lambda body: body[:12])
def test_a_body_that_is_no_json_object_is_refused(gateway, body):
    with gateway.http() as client:
        answer = client.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"prompt": "\\ud83d"}', "\\ud83d is the first half of a surrogate pair"),
        (
            b'{"messages": [{"content": "a\\uD83D"}]}',
            "\\uD83D is the first half of a surrogate pair",
        ),
        (b'{"prompt": "\\ud83d and more of it"}', "surrogate pair"),
        (b'{"prompt": "\\ud83d\\ude00', "truncated"),
        (b'{"prompt": "\\\\ud83d', "truncated"),
        (b'{"prompt": "\\\\\\ud83d"}', "\\ud83d is the first half of a surrogate pair"),
        (b'{"prompt": "\\\\\\ud83d\\ude00', "truncated"),
        (b'{"prompt": "' + b"\\" * 70_000 + b'\\ud83d"}', "\\ud83d is the first half"),
        (b'{"prompt": "' + b"\\" * 70_001 + b"\\ud83d", "truncated"),
        (b" ", "it is empty"),
        (b'{bad,"b":"\\ud83d"}', "object keys must be strings"),
        (b'{"a":1e999,', "truncated"),
        (b'{"a":1e999,"b":[}', "not valid JSON"),
        (b'{"a":1e999,"\xff":1}', "not valid JSON"),
        (b'{"a":1e999,"b":' + b"[" * 50_000, "not valid JSON"),
    ],
)
def test_a_character_that_was_cut_in_two_is_no_truncated_body(body, told):
    """JavaScript's `slice` cuts there, and the prompt is often the last field."""
    with pytest.raises(ApiError) as refused:
        decode_object(body)
    assert (refused.value.code, told in refused.value.message) == ("invalid_json", True)


def test_an_integer_of_too_many_digits_is_refused_by_its_fields_name(gateway):
    with gateway.http() as client:
        answer = client.post("/v1/completions", content=b'{"a": ' + b"9" * 5000 + b"}")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "a", "invalid_type")


def test_harmless_fields_and_neutral_values_are_accepted(gateway):
    harmless = {
        "user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto",
        "parallel_tool_calls": True, "tools": [], "tool_choice": "none", "logit_bias": {},
        "response_format": {"type": "text"}, "include_draft_logprobs": False, "best_of": 1,
        "n": None, "stop": None, "seed": -5, "top_k": -1, "some_future_field": 1, "logprobs": None,
        "echo": False, "top_logprobs": 0, "max_completion_tokens": None,
    }  # fmt: skip
    with gateway.http() as client:
        for path, base in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
            answer = client.post(path, json=base | harmless)
            assert answer.status_code == 200, answer.text


def test_logprobs_without_top_logprobs_mean_the_sampled_token(gateway):
    with gateway.http() as client:
        answer = client.post(
            "/v1/chat/completions", json=CHAT | {"logprobs": True, "top_logprobs": None}
        )
    entries = answer.json()["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer.json()["usage"]["completion_tokens"]
    assert all(entry["top_logprobs"] == [] for entry in entries)


def test_an_unknown_model_is_404(gateway):
    with gateway.http() as client:
        for answer in (
            client.post("/v1/completions", json=TEXT | {"model": "other"}),
            client.get("/v1/models/other"),
            client.post("/detokenize", json={"model": "other", "tokens": []}),
        ):
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "model_not_found"


def test_unknown_paths_and_methods_answer_in_the_same_shape(gateway):
    with gateway.http() as client:
        for answer, status in (
            (client.get("/v1/nothing"), 404),
            (client.get("/v1/completions"), 405),
            (client.post("/v1/completions/", json=TEXT), 404),
            (client.get("/healthz/"), 404),
        ):
            assert answer.status_code == status
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("/chat/completions", "; here it is /v1/chat/completions"),
        ("/v1/v1/completions", "; here it is /v1/completions"),
        ("/v1/chat/completions/", "; here it is /v1/chat/completions"),
        ("/models", "; here it is /v1/models"),
        ("/v1/embeddings", ""),
    ],
)
def test_a_base_url_that_is_wrong_is_told_the_path_that_was_meant(gateway, asked, meant):
    with gateway.http() as client:
        answer = client.post(asked, json=CHAT)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == f"POST {asked}: Not Found{meant}"


def test_an_oversized_body_is_413_declared_or_not(gateway):
    body = b'{"prompt": "' + b"x" * (17 << 20) + b'"}'
    with gateway.http() as client:
        declared = client.post("/v1/completions", content=body)
        chunked = client.post("/v1/completions", content=iter([body[: 9 << 20], body[9 << 20 :]]))
    for answer in (declared, chunked):
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_a_long_value_does_not_fill_the_answer_and_hides_no_fix(gateway):
    digits, word = b"9" * 4000, "x" * 100_000
    with gateway.http() as client:
        n = client.post("/v1/completions", content=b'{"prompt": "a", "n": ' + digits + b"}")
        role = {"messages": [{"role": word, "content": "a"}]}
        others = [
            client.post("/v1/chat/completions", json=CHAT | role),
            client.post("/v1/completions", json=TEXT | {"model": word}),
            client.post("/v1/completions", json=TEXT | {"logprobs_mode": word}),
        ]
    for answer in (n, *others):
        assert answer.status_code in (400, 404)
        assert len(answer.content) < 1000
    assert n.json()["error"]["message"].endswith("it must be 1 to 128")
    assert "not one of" in others[0].json()["error"]["message"]


WORDS = "this model's maximum context length is 512 tokens: "
"""By which clients know it: litellm's ContextWindowExceededError, and whoever shortens by that."""


@pytest.mark.parametrize(
    ("change", "field", "told"),
    [
        ({"prompt": [5] * 512}, "prompt", "the prompt has 512, so no token could be generated"),
        ({"prompt": [5] * 9, "max_tokens": 504}, "max_tokens", "9 of the prompt and 504 of output"),
        ({"prompt": [5] * 40_000}, "prompt", "prompt has more"),
    ],
)
def test_a_context_that_is_too_short_is_told_in_the_words_that_clients_look_for(
    gateway, change, field, told
):
    with gateway.http() as client:
        error = client.post("/v1/completions", json=TEXT | change).json()["error"]
    assert error["message"].startswith(WORDS + told)
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")


@pytest.mark.parametrize(("n_prompt", "n_output"), [(9, 16), (496, 16), (497, 15), (511, 1)])
def test_a_completion_that_names_no_length_gets_what_the_context_leaves_of_16(
    gateway, n_prompt, n_output
):
    with gateway.http() as client:
        answer = client.post("/v1/completions", json={"model": "tiny", "prompt": [5] * n_prompt})
    assert answer.status_code == 200, answer.text
    assert gateway.link.sent(Submit)[-1][1].sampling.max_tokens == n_output


def test_of_several_prompts_that_name_no_length_none_is_cut_short_by_another(gateway):
    body = {"model": "tiny", "prompt": [[5] * 9, [5] * 511]}
    with gateway.http() as client:
        error = client.post("/v1/completions", json=body).json()["error"]
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    assert error["message"] == (
        f"{WORDS}511 of the prompt and 16 of output are more; name max_tokens, for several prompts"
        " have 16 each without it"
    )
    assert gateway.link.commands == []


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(gateway, monkeypatch):
    seen = []
    whole = GatewayTokenizer.encode_long

    def encode_long(self, text, **options):
        seen.append(len(text))
        return whole(self, text, **options)

    monkeypatch.setattr(GatewayTokenizer, "encode_long", encode_long)
    with gateway.http() as client:
        for path, body in (
            ("/v1/completions", TEXT | {"prompt": "x" * 1_000_000}),
            ("/v1/completions", TEXT | {"prompt": ["a", "x" * 1_000_000]}),
            (
                "/v1/chat/completions",
                CHAT | {"messages": [{"role": "user", "content": "x" * 1_000_000}]},
            ),
        ):
            error = client.post(path, json=body).json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert error["message"].startswith(WORDS)
            assert error["param"] == ("prompt" if "prompt" in body else "messages")
    assert seen == []
    assert gateway.link.commands == []


def test_parts_within_bounds_make_no_answer_beyond_memory(gateway):
    """Each choice tells its prompt: 3 KB would become 350 MB, and gigabytes with 32k tokens."""
    prompt, both = [7] * 500, {"prompt_logprobs": 20, "echo": True, "logprobs": 20}
    cases = [
        ({"prompt": [prompt] * 2, "n": 128, **both}, "n"),
        ({"prompt": [prompt] * 4, "n": 128, "echo": True, "logprobs": 20}, "n"),
        ({"prompt": [prompt] * 400, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt": [prompt] * 400, "echo": True, "logprobs": 20}, "logprobs"),
    ]
    with gateway.http() as client:
        for asked, param in cases:
            body = {"model": "tiny", "max_tokens": 0, **asked}
            error = client.post("/v1/completions", json=body).json()["error"]
            assert error["param"] == param, error
            assert "logprobs of prompt tokens" in error["message"]
            assert str(MAX_PROMPT_LOGPROBS) in error["message"]
    assert gateway.link.commands == []


def test_what_an_answer_tells_of_prompts_is_counted_as_it_is_told():
    """Neither what the output may become nor a prompt that is echoed as text is a logprob of it."""
    asked = {"prompts": ((1, 2, 3), (4,)), "n": 5}
    shape = {"endpoint": Endpoint.COMPLETION, "stops": (), "stream": False, "include_usage": False}

    def count(logprobs_k, **more):
        params = RequestParams(sampling=SamplingParams(max_tokens=9), logprobs_k=logprobs_k)
        request = GenerationRequest(**asked, **shape, params=params, return_token_ids=False, **more)
        return request.n_prompt_logprobs

    assert count(logprobs_k=20) == count(logprobs_k=-1, echo=True) == 0
    assert count(logprobs_k=-1, prompt_logprobs_k=0) == 20
    assert count(logprobs_k=2, prompt_logprobs_k=3, echo=True) == 20 * (4 + 3)
