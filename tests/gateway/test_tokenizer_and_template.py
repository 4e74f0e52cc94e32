"""The model folder's tokenizer and chat template: loaded, refused, sandboxed, and over HTTP."""

import json
import os
import shutil
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.compatibility import chat_template_hash
from baton_worker.config import ConfigError, ModelConfig, ProcessConfig
from baton_worker.gateway.text.chat_template import ChatTemplate, ChatTemplateError
from baton_worker.gateway.text.tokenizer import load_tokenizer
from baton_worker.gateway.text.tokenizer_info import tokenizer_info

USER = [{"role": "user", "content": "hi"}]


def test_tokenize_and_detokenize_are_inverse(start_gateway):
    with start_gateway().http() as client:
        made = client.post("/tokenize", json={"model": "tiny", "prompt": "the café"}).json()
        assert made["tokens"][0] == 0
        assert made["count"] == len(made["tokens"])
        assert made["max_model_len"] == 512
        text = client.post("/detokenize", json={"tokens": made["tokens"]}).json()
        assert text == {"prompt": "<s>the café"}
        chat = client.post("/tokenize", json={"messages": USER, "add_generation_prompt": False})
        text = client.post("/detokenize", json={"tokens": chat.json()["tokens"]}).json()
        assert text == {"prompt": "<s><|user|>hi"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": USER, "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"messages": USER, "tool_choice": "required"}, "tool_choice"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [9999]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
def test_bad_tokenize_requests_name_the_field(start_gateway, path, body, param):
    with start_gateway().http() as client:
        answer = client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_long_text_is_tokenised_the_same(start_gateway, tokenizer):
    text = "the quick brown fox " * 2000
    with start_gateway(info={"max_model_len": 1 << 16}).http() as client:
        made = client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert made["tokens"] == tokenizer.encode(text, add_special_tokens=False)


def test_a_client_needs_no_tokenizer_of_its_own(start_gateway):
    """What lm-eval's remote tokenizer asks for, which is how vLLM tells it."""
    with start_gateway().http() as client:
        info = client.get("/tokenizer_info").json()
        assert (info["bos_token"], info["eos_token"]) == ("<s>", "</s>")
        assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
        template = ChatTemplate(info["chat_template"], {"bos_token": info["bos_token"]})
        text = template.render(USER)
        ids = client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
        chat = client.post("/tokenize", json={"messages": USER}).json()
        assert ids["tokens"] == chat["tokens"]
        eos = client.post(
            "/tokenize", json={"prompt": info["eos_token"], "add_special_tokens": False}
        )
        assert eos.json()["tokens"] == [1]
        assert client.post("/tokenizer_info").status_code == 405


def test_tokenizer_info_tells_tokens_as_text_and_no_place_of_a_file():
    token = {"content": "<|im_end|>", "lstrip": False, "normalized": False, "special": True}
    config = {
        "added_tokens_decoder": {"151645": token},
        "additional_special_tokens": [token, "<|im_start|>"],
        "eos_token": token,
        "tokenizer_class": "Qwen2Tokenizer",
        "vocab_file": "/models/vocab.json",
        "name_or_path": "/models/here",
        "chat_template": [{"name": "default", "template": "old"}],
        "model_max_length": 32768,
    }
    assert tokenizer_info(config, "new") == {
        "added_tokens_decoder": {"151645": "<|im_end|>"},
        "additional_special_tokens": ["<|im_end|>", "<|im_start|>"],
        "eos_token": "<|im_end|>",
        "tokenizer_class": "Qwen2Tokenizer",
        "chat_template": "new",
        "model_max_length": 32768,
    }
    assert "chat_template" not in tokenizer_info(config, None)


THINKING = (
    "{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>"
    "{%- if enable_thinking is defined and enable_thinking is false %}none{% endif %}{% endif %}"
)
"""The rule of Qwen3's template: thinking is on unless it is switched off by name."""


@pytest.mark.parametrize(
    ("variables", "ending"),
    [({}, ""), ({"enable_thinking": True}, ""), ({"enable_thinking": False}, "none")],
)
def test_thinking_is_switched_by_the_templates_own_variable(variables, ending):
    rendered = ChatTemplate(THINKING, {}).render(USER, variables=variables)
    assert rendered == f"<|user|>hi<|assistant|>{ending}"


def test_a_tokenized_chat_has_the_templates_variables(start_gateway):
    asked = {"messages": USER, "chat_template_kwargs": {"bos_token": "the"}}
    with start_gateway().http() as client:
        tokens = client.post("/tokenize", json=asked).json()["tokens"]
        text = client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text == "the<|user|>hi<|assistant|>"


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
@pytest.mark.parametrize(("name", "value"), [("add_generation_prompt", False), ("messages", [])])
def test_a_field_of_the_request_is_not_lost_among_the_templates_variables(
    start_gateway, path, name, value
):
    asked = {"messages": USER, "chat_template_kwargs": {name: value}}
    with start_gateway().http() as client:
        answer = client.post(path, json=asked)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"chat_template_kwargs.{name}"


@given(st.text(max_size=200), st.booleans())
def test_both_ways_to_tokenise_agree(tokenizer, text, special):
    short = tokenizer.encode(text, add_special_tokens=special)
    assert tokenizer.encode_long(text, add_special_tokens=special) == short
    assert tokenizer.decode(short).removeprefix("<s>") == text


@pytest.fixture
def patient_threads():
    """A thread that waits for the GIL does not ask for it: it runs when the holder lets go."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    yield
    sys.setswitchinterval(before)


def test_other_threads_run_while_a_long_text_is_tokenised(tokenizer, patient_threads):
    """Streams of others would stand still, and the link's thread with them until workers seem
    dead.
    """
    text = "the quick brown fox " * 20_000
    done = threading.Event()

    def work():
        tokenizer.encode_long(text, add_special_tokens=False)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    turns = 0
    while not done.is_set():
        turns += 1
        os.sched_yield()  # lets go of the GIL
    thread.join()
    assert turns > 10


def test_a_template_sees_messages_special_tokens_and_kwargs():
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'x' %}{% continue %}{% endif %}"
        "{{ m.content }}{% endfor %}{{ thinking|tojson }}{{ add_generation_prompt }}",
        {"bos_token": "<s>"},
    )
    messages = [*USER, {"role": "x", "content": "hidden"}]
    rendered = template.render(messages, variables={"thinking": ["<é>"], "messages": []})
    assert rendered == '<s>hi["<é>"]True'


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_misbehaves_is_an_error_of_the_request(source):
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, {}).render(USER)


def test_a_template_with_a_syntax_error_is_a_configuration_error():
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("x\n{% if %}", {})


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% break %}", "'break' outside loop"),
        ("{% for a in [1] %}" * 21 + "{% endfor %}" * 21, "too many statically nested blocks"),
        ("{% if 1 %}" * 101 + "{% endif %}" * 101, "too many levels of indentation"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "recursion"),
        ("{{ f(a=1, a=2) }}", "keyword argument repeated: a"),
        ("{{ " + "1" * 5000 + " }}", "4300 digits"),
    ],
)
def test_a_template_that_python_cannot_compile_is_a_configuration_error(source, reason):
    with pytest.raises(ConfigError, match=rf"model\.path: chat template: .*{reason}"):
        ChatTemplate(source, {})


def test_the_templates_own_file_comes_first(model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("own {{ eos_token }}")
    assert load_tokenizer(folder).chat_template.render(USER) == "own </s>"


def test_special_tokens_of_older_exports_are_those_of_their_own_file(model_folder, tmp_path):
    shutil.copy(model_folder / "tokenizer.json", tmp_path)
    source = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token is defined }}"
    (tmp_path / "chat_template.jinja").write_text(source)
    config = {"add_bos_token": True, "bos_token": None, "eos_token": "the", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": {"content": "<pad>"}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named | {"unk_token": None}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.chat_template.render(USER) == "<s>|</s>|<pad>|False"
    first, *_ = tokenizer.encode("the", add_special_tokens=True)
    assert tokenizer.decode([first]) == "<s>"
    assert (tokenizer.info["bos_token"], tokenizer.info["pad_token"]) == ("<s>", "<pad>")


def test_a_token_that_is_none_is_told_with_both_files_that_may_say_it(model_folder, tmp_path):
    shutil.copy(model_folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True}))
    message = r"/tokenizer_config\.json: bos_token is None, which is no token of tokenizer\.json"
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<nope>"}))
    message = (
        r"/tokenizer_config\.json or special_tokens_map\.json beside it: bos_token is '<nope>'"
    )
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(tmp_path)


def test_where_added_tokens_are_listed_a_token_that_is_none_stays_none(model_folder, tmp_path):
    shutil.copy(model_folder / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token is defined }}")
    config = {"added_tokens_decoder": {}, "bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>"}))
    assert load_tokenizer(tmp_path).chat_template.render(USER) == "False"


def test_a_list_of_templates_gives_its_default(model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    templates = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert load_tokenizer(folder).chat_template.render(USER) == "d"


@pytest.mark.parametrize("source", [5, {"default": "t"}, ["t"], [{"name": "default"}]])
def test_a_template_that_is_none_is_a_configuration_error(model_folder, tmp_path, source):
    shutil.copy(model_folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    with pytest.raises(
        ConfigError, match=r"model\.path: .*tokenizer_config\.json: chat_template: "
    ):
        load_tokenizer(tmp_path)


def test_a_model_without_a_template_is_loaded(model_folder, tmp_path):
    shutil.copy(model_folder / "tokenizer.json", tmp_path)
    assert load_tokenizer(tmp_path).chat_template is None


@pytest.mark.parametrize("content", [None, "{", "[]", '{"version": "1.0"}'])
def test_a_missing_or_broken_tokenizer_is_a_configuration_error(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"model\.path: .*tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_a_decoder_without_fixed_bytes_is_refused_by_name(model_folder, tmp_path, decoder):
    document = json.loads((model_folder / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(document | {"decoder": decoder}))
    with pytest.raises(ConfigError, match="decoder"):
        load_tokenizer(tmp_path)


def hash_of(folder, template=None, file=None, **config):
    folder.mkdir(exist_ok=True)
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if file is not None:
        (folder / "chat_template.jinja").write_text(file)
    return chat_template_hash(ProcessConfig(model=ModelConfig(path=str(folder))))


def test_the_hash_of_a_chat_template_follows_what_makes_the_text(tmp_path):
    base = hash_of(tmp_path / "a", "{{ messages }}", bos_token="<s>")
    assert hash_of(tmp_path / "b", "{{ messages }}", bos_token={"content": "<s>"}) == base
    assert hash_of(tmp_path / "c", "{{ messages }}", bos_token="<s>", model_max_length=9) == base
    assert hash_of(tmp_path / "d", "other", file="{{ messages }}", bos_token="<s>") == base
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": "{{ messages }}"}]
    assert hash_of(tmp_path / "e", named, bos_token="<s>") == base
    others = [
        hash_of(tmp_path / "f", "{{ messages }} ", bos_token="<s>"),
        hash_of(tmp_path / "g", "{{ messages }}", bos_token="<t>"),
        hash_of(tmp_path / "h"),
    ]
    assert len({base, *others}) == 4
    assert others[-1] == ""
