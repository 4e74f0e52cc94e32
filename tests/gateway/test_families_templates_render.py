"""What the published templates of the supported families need of a server, rule by rule.

The templates in `family_templates` are ours: each is as small as shows the rules that a family's
own has. Requests go through the real intake, tokenizer and template.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from baton_testing.scripted_link import EOS
from baton_worker.compatibility import chat_source
from baton_worker.config import ConfigError
from baton_worker.gateway.errors import ApiError
from baton_worker.gateway.intake.intake import Intake
from baton_worker.gateway.request import ModelLimits
from baton_worker.gateway.text.tokenizer import load_tokenizer

Prompt = Callable[..., str]

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Wetter <heute> & morgen: 天气",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
USER = {"role": "user", "content": "hi"}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Köln"}'},
}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "rain"}

TEMPLATES = Path(__file__).parent / "family_templates"
LLAMA, QWEN3, CODER, GLM, DEEPSEEK, ERNIE = (
    (TEMPLATES / f"{name}.jinja").read_text()
    for name in ("llama", "qwen3", "coder", "glm", "deepseek", "ernie")
)


@pytest.fixture
def prompt(model_folder: Path, tmp_path: Path) -> Prompt:
    """`prompt(template, messages, config={}, files={}, **fields)`: the text that a request for a
    chat becomes, by a folder with this template.
    """

    def made(
        template: Any,
        messages: list[dict[str, Any]],
        config: dict[str, Any] | None = None,
        files: dict[str, str] | None = None,
        **fields: Any,
    ) -> str:
        shutil.copy(model_folder / "tokenizer.json", tmp_path)
        told = {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "</s>"}
        told |= {"chat_template": template} if template else {}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(told | (config or {})))
        for name, text in (files or {}).items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        tokenizer = load_tokenizer(tmp_path)
        intake = Intake("m", tokenizer, lambda: ModelLimits(1 << 16, 512, 20), 20)
        body = json.dumps({"messages": messages, **fields}).encode()
        return tokenizer.decode(asyncio.run(intake.tokenize(body)))

    return made


def refused(prompt: Prompt, *args: Any, **kwargs: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        prompt(*args, **kwargs)
    assert caught.value.status == 400
    return caught.value


def test_llama_finds_no_tools_where_there_are_none(prompt: Prompt) -> None:
    made = prompt(LLAMA, [USER], chat_template_kwargs={"date_string": "today"})
    assert made == "<s>(|today)<user>hi<assistant>"
    ruled = [{"role": "system", "content": " be kind "}, USER]
    made = prompt(LLAMA, ruled, chat_template_kwargs={"date_string": "today"})
    assert made == "<s>(be kind|today)<user>hi<assistant>"


def test_llama_has_a_date_of_its_own(prompt: Prompt) -> None:
    year = prompt(LLAMA, [USER]).removeprefix("<s>(|").removesuffix(")<user>hi<assistant>")
    assert year.isdigit()


def test_llama_shows_tools_calls_and_results_as_json(prompt: Prompt) -> None:
    fields = {"tools": [WEATHER], "chat_template_kwargs": {"date_string": ""}}
    made = prompt(LLAMA, [USER, CALLED, RESULT], **fields)
    shown = json.dumps(WEATHER, indent=4, ensure_ascii=False)
    called = '{"name": "weather", "parameters": {"city": "Köln"}}'
    assert made == f"<s>(|){shown}<user>hi{called}[rain]<assistant>"


def test_what_a_template_raises_is_the_requests_error(prompt: Prompt) -> None:
    error = refused(prompt, LLAMA, [USER, {**CALLED, "tool_calls": [CALL, CALL]}])
    assert (error.param, error.message) == ("messages", "messages: one call at a time")


@pytest.mark.parametrize(
    ("variables", "ending"),
    [(None, ""), ({"enable_thinking": True}, ""), ({"enable_thinking": False}, "<think></think>")],
)
def test_qwen3_thinks_unless_it_is_told_not_to(
    prompt: Prompt, variables: dict[str, Any] | None, ending: str
) -> None:
    made = prompt(QWEN3, [USER], config={"bos_token": None}, chat_template_kwargs=variables)
    assert made == f"<user>hi<assistant>{ending}"


def test_qwen3_keeps_the_thoughts_behind_the_last_question_alone(prompt: Prompt) -> None:
    old = {"role": "assistant", "content": "<think>\nlong\n</think>\n\nfirst"}
    new = {**CALLED, "reasoning_content": "ask\n"}
    made = prompt(QWEN3, [USER, old, USER, new, RESULT], tools=[WEATHER])
    called = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
    assert made == (
        f"# Tools\n{json.dumps(WEATHER, ensure_ascii=False)}<user>hi<assistant>first<user>hi"
        f"<assistant><think>ask</think>{called}<reply>rain</reply><assistant>"
    )


def test_vllms_new_name_of_reasoning_is_the_old_one(prompt: Prompt) -> None:
    message = {"role": "assistant", "content": "a"}
    old, new = (
        prompt(QWEN3, [USER, {**message, name: "b"}]) for name in ("reasoning_content", "reasoning")
    )
    assert old == new == "<user>hi<assistant><think>b</think>a<assistant>"


def test_a_coders_template_walks_through_arguments(prompt: Prompt) -> None:
    call = {"name": "f", "arguments": '{"path": "a.py", "lines": [1, 2], "n": 3}'}
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}
    made = prompt(CODER, [USER, message], tools=[WEATHER])
    schema = json.dumps(WEATHER["function"]["parameters"])  # type: ignore[index]
    assert made == (
        f"<name>weather<parameters>{schema}<user>hi"
        "<function=f><parameter=path>a.py<parameter=lines>[1, 2]<parameter=n>3"
    )


def test_arguments_may_come_as_an_object(prompt: Prompt) -> None:
    call = {"name": "f", "arguments": {"path": "é"}}
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": call}]}
    assert prompt(CODER, [message], tools=[WEATHER]).endswith("<function=f><parameter=path>é")
    assert '"arguments": {"path": "é"}' in prompt(QWEN3, [USER, message])
    assert "<sep>f\n" + '{"path": "é"}' in prompt(DEEPSEEK, [USER, message])


@pytest.mark.parametrize("arguments", ["", None])
def test_a_call_without_arguments_has_an_empty_object(prompt: Prompt, arguments: Any) -> None:
    call = {"name": "f", "arguments": arguments}
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": call}]}
    assert '"arguments": {}}' in prompt(QWEN3, [USER, message])
    assert prompt(CODER, [message], tools=[WEATHER]).endswith("<function=f>")


def test_arguments_that_are_no_json_stay_text_or_are_refused(prompt: Prompt) -> None:
    call = {"name": "f", "arguments": '{"broken'}
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": call}]}
    assert '"arguments": {"broken}' in prompt(QWEN3, [USER, message])
    error = refused(prompt, GLM, [USER, CALLED, message], tools=[WEATHER])
    assert error.param == "messages[2].tool_calls[0].function.arguments"
    assert error.message.startswith(f"{error.param}: it is no JSON object, and ")
    assert "items" in error.message


def test_arguments_that_are_no_json_are_not_at_fault_for_something_else(prompt: Prompt) -> None:
    call = {"function": {"name": "f", "arguments": '{"broken'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call, call]}
    error = refused(prompt, LLAMA, [USER, message])
    assert (error.param, error.message) == ("messages", "messages: one call at a time")


WALKING = (
    "{% for t in tools or [] %}{% for n in t.function.parameters.properties.items() %}{{ n }}"
    "{% endfor %}{% endfor %}{% for i in range(n or 1) %}{% endfor %}{{ messages[0].content }}"
)


def test_what_fails_in_a_template_is_about_all_that_it_was_given(prompt: Prompt) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": [1]}}]
    error = refused(prompt, WALKING, [USER], tools=tools)
    assert (error.param, error.message.partition(": ")[0]) == (None, "messages, tools")
    error = refused(prompt, WALKING, [USER], chat_template_kwargs={"n": "x"})
    assert error.param is None
    assert error.message.startswith("messages, chat_template_kwargs: the chat template failed: ")
    error = refused(
        prompt, "{{ raise_exception('no') }}", [USER], tools=[], chat_template_kwargs={}
    )
    assert (error.param, error.message) == ("messages", "messages: no")


def test_glm_writes_json_that_is_not_ascii(prompt: Prompt) -> None:
    call = {"name": "f", "arguments": '{"city": "Köln", "days": {"n": "两"}}'}
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": call}]}
    made = prompt(GLM, [USER, message, RESULT], tools=[WEATHER])
    assert made == (
        f"<sop>{json.dumps(WEATHER, ensure_ascii=False)}<user>hi<assistant>"
        "<tool_call>f<arg_key>city</arg_key><arg_value>Köln</arg_value><arg_key>days</arg_key>"
        '<arg_value>{"n": "两"}</arg_value></tool_call><observation>rain<assistant>'
    )


def test_glm_is_switched_by_name_too(prompt: Prompt) -> None:
    quick = prompt(GLM, [USER], chat_template_kwargs={"enable_thinking": False})
    assert quick == "<sop><user>hi/quick<assistant><think></think>"
    assert prompt(GLM, [USER]) == "<sop><user>hi<assistant>"


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(("template", "text"), [(GLM, "onetwo"), (QWEN3, "one\ntwo")])
def test_parts_are_the_templates_to_join_if_it_can(
    prompt: Prompt, template: str, text: str
) -> None:
    made = prompt(template, [{"role": "user", "content": PARTS}], add_generation_prompt=False)
    assert made.removeprefix("<sop>") == f"<user>{text}"


def test_deepseek_adds_arguments_to_text_where_there_is_no_content(prompt: Prompt) -> None:
    made = prompt(DEEPSEEK, [{"role": "system", "content": "R."}, USER, CALLED, RESULT])
    assert made == (
        '<s>R.<User>hi<call>function<sep>weather\n{"city": "Köln"}\n<output>rain<Assistant>'
    )
    answered = [USER, {"role": "assistant", "content": "<think>a</think>b"}, USER]
    assert prompt(DEEPSEEK, answered) == "<s><User>hi<Assistant>b</s><User>hi<Assistant>"


def test_a_call_without_content_says_nothing_else(prompt: Prompt) -> None:
    """GLM's template would write None, were it given that; DeepSeek's asks for it."""
    for message in (CALLED, {k: v for k, v in CALLED.items() if k != "content"}):
        assert "None" not in prompt(GLM, [USER, message])
        assert "<call>" in prompt(DEEPSEEK, [USER, message])


def test_ernie_finds_tokens_that_few_templates_name(prompt: Prompt) -> None:
    tokens = {"cls_token": "<s>", "sep_token": {"content": "</s>"}, "bos_token": None}
    messages = [USER, {"role": "assistant", "content": "yo"}, USER]
    made = prompt(ERNIE, messages, config=tokens)
    assert made == "<s>User: hi\nAssistant: yo</s>User: hi\nAssistant: "


@pytest.mark.parametrize("template", [DEEPSEEK, ERNIE])
def test_tools_that_a_template_does_not_show_are_refused(prompt: Prompt, template: str) -> None:
    error = refused(prompt, template, [USER], tools=[WEATHER])
    assert error.param == "tools"
    assert prompt(template, [USER], tools=[]) == prompt(template, [USER])


def test_tools_that_a_chat_would_not_show_are_not_told_of_it(prompt: Prompt) -> None:
    plain, shown = prompt(QWEN3, [USER]), prompt(QWEN3, [USER], tools=[WEATHER], tool_choice="auto")
    assert prompt(QWEN3, [USER], tools=[WEATHER], tool_choice="none") == plain != shown


def test_tools_are_no_variable(prompt: Prompt) -> None:
    error = refused(prompt, QWEN3, [USER], chat_template_kwargs={"tools": [WEATHER]})
    assert error.param == "chat_template_kwargs.tools"


NAMED = [
    {"name": "default", "template": "plain {{ tools is none }}"},
    {"name": "tool_use", "template": "with {{ tools[0].function.name }}"},
]


def test_a_template_for_tools_is_used_with_tools(prompt: Prompt) -> None:
    assert prompt(NAMED, [USER]) == "plain True"
    assert prompt(NAMED, [USER], tools=[WEATHER]) == "with weather"


def test_templates_in_files_come_before_those_of_the_configuration(prompt: Prompt) -> None:
    files = {"chat_template.jinja": "file"}
    assert prompt(NAMED, [USER], files=files) == "file"
    assert refused(prompt, NAMED, [USER], files=files, tools=[WEATHER]).param == "tools"
    files["additional_chat_templates/tool_use.jinja"] = "tools {{ tools | length }}"
    assert prompt(NAMED, [USER], files=files, tools=[WEATHER]) == "tools 1"


def test_what_marks_an_answer_for_training_is_its_text(prompt: Prompt) -> None:
    template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}"
    )
    assert prompt(template, [USER, USER]) == "hi;hi;"


def test_json_may_be_written_in_each_way(prompt: Prompt) -> None:
    template = (
        "{{ x | tojson(sort_keys=true, separators=(',', ':')) }}{{ x | tojson(ensure_ascii=True) }}"
    )
    made = prompt(template, [USER], chat_template_kwargs={"x": {"b": "<é>", "a": 1}})
    assert made == '{"a":1,"b":"<é>"}{"b": "<\\u00e9>", "a": 1}'


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, "<s>hi"),
        ({"add_bos_token": True}, "<s>hi"),
        ({"add_bos_token": False}, "hi"),
        ({"add_bos_token": True, "add_eos_token": True}, "<s>hi</s>"),
        ({"add_bos_token": False, "bos_token": None}, "hi"),
        ({"add_bos_token": None}, "<s>hi"),
        ({"add_bos_token": None, "add_eos_token": True}, "hi</s>"),
        ({"add_bos_token": True, "bos_token": "<|user|>"}, "<|user|>hi"),
        ({"add_bos_token": True, "bos_token": ":"}, ":hi"),
        ({"add_bos_token": True, "bos_token": "$"}, "$hi"),
        ({"add_bos_token": True, "add_eos_token": True, "eos_token": "<s>"}, "<s>hi<s>"),
    ],
)
def test_a_plain_prompt_gets_the_ends_that_the_configuration_says(
    model_folder: Path, tmp_path: Path, flags: dict[str, Any], expected: str
) -> None:
    """DeepSeek's tokenizer.json adds nothing of its own, and `add_bos_token` is true."""
    shutil.copy(model_folder / "tokenizer.json", tmp_path)
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}} | flags
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    for encode in (tokenizer.encode, tokenizer.encode_long):
        assert tokenizer.decode(encode("hi", add_special_tokens=True)) == expected
        assert tokenizer.decode(encode("hi", add_special_tokens=False)) == "hi"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"add_bos_token": True, "bos_token": "<other>"}, "bos_token is '<other>', which is no"),
        ({"add_bos_token": True, "bos_token": "$A"}, "bos_token is '$A', which is no token"),
        ({"add_bos_token": True, "bos_token": ""}, "bos_token is '', which is no token"),
        ({"add_bos_token": True, "bos_token": None}, "bos_token is None, which is no token"),
        ({"add_eos_token": True, "eos_token": ["x"]}, "eos_token is ['x'], which is no token"),
        ({"add_eos_token": True}, "eos_token is None, which is no token"),
        ({"add_bos_token": "false", "bos_token": "<s>"}, "add_bos_token is 'false': it must be"),
        ({"add_bos_token": 1, "bos_token": "<s>"}, "add_bos_token is 1: it must be true or false"),
    ],
)
def test_an_end_that_is_no_token_is_a_configuration_error(
    model_folder: Path, tmp_path: Path, flags: dict[str, Any], reason: str
) -> None:
    shutil.copy(model_folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(flags))
    with pytest.raises(ConfigError, match=rf"tokenizer_config\.json: {re.escape(reason)}"):
        load_tokenizer(tmp_path)


def test_a_folder_with_sentencepieces_file_alone_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"save_pretrained, which writes tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_rare_special_tokens_make_no_model_another_one(tmp_path: Path) -> None:
    """Processes of an older version tell the hash of a template without them."""
    config = {"chat_template": "{{ bos_token }}", "bos_token": "<s>", "cls_token": "<c>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    source = chat_source(tmp_path)
    assert source is not None
    assert source.special_tokens == {"bos_token": "<s>"}


MARKUP = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<arg_key>")
"""Added tokens that are not special: Qwen3's, MiMo's and GLM's."""


@pytest.fixture
def model_folder_with_markup(model_folder: Path, tmp_path: Path) -> Path:
    """A folder whose tokenizer has these, and one that is special, as `<|python_tag|>` is."""
    folder = tmp_path / "markup"
    shutil.copytree(model_folder, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in MARKUP])
    tokenizer.add_special_tokens(["<|python_tag|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_markup_of_an_answer_is_text(model_folder_with_markup: Path) -> None:
    tokenizer = load_tokenizer(model_folder_with_markup)
    text = '<think>hm</think><tool_call>{"name": "f"}<arg_key></tool_call>'
    ids = tokenizer.encode(f"<|python_tag|>{text}", add_special_tokens=False)
    assert set(map(tokenizer.vocabulary.names.__getitem__, ids)) >= {*MARKUP, "<|python_tag|>"}
    output = tokenizer.vocabulary.detokeniser()
    assert output.feed(ids) + output.flush() == text, "what is special is no text"
    whole = tokenizer.vocabulary.as_text(skip_special=False).detokeniser()
    assert whole.feed(ids) + whole.flush() == f"<|python_tag|>{text}"


SPECIAL = 3
"""`<|assistant|>` of the small tokenizer."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("skip", "text"), [(None, "hi"), (True, "hi"), (False, "<|assistant|>hi<|assistant|>")]
)
def test_special_tokens_are_text_where_a_request_wants_them(
    start_gateway: Any, tokenizer: Any, stream: bool, skip: bool | None, text: str
) -> None:
    """The end of sequence is none in any case."""
    said = tokenizer.encode("hi", add_special_tokens=False)
    gateway = start_gateway(lambda submit: [SPECIAL, *said, SPECIAL, EOS])
    asked = {"prompt": "a", "max_tokens": 20, "stream": stream, "skip_special_tokens": skip}
    with gateway.http() as client:
        answer = client.post("/v1/completions", json=asked)
    if stream:
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        choices = [json.loads(line)["choices"] for line in lines if line.startswith("{")]
        assert "".join(choice["text"] for (choice,) in filter(None, choices)) == text
    else:
        assert answer.json()["choices"][0]["text"] == text


def test_an_echoed_prompt_has_its_special_tokens_as_text_too(start_gateway: Any) -> None:
    with start_gateway().http() as client:
        ids = client.post("/tokenize", json={"prompt": "a"}).json()["tokens"]
        asked = {"prompt": ids, "echo": True, "max_tokens": 1, "skip_special_tokens": False}
        assert client.post("/v1/completions", json=asked).json()["choices"][0]["text"][:4] == "<s>a"
        asked["skip_special_tokens"] = True
        assert client.post("/v1/completions", json=asked).json()["choices"][0]["text"][0] == "a"
