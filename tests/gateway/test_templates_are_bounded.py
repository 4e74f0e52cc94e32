"""A hostile template, or hostile variables for a good one, run no code and end."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.config import ConfigError
from baton_worker.gateway.text.chat_template import ChatTemplate, ChatTemplateError
from baton_worker.gateway.text.format_size import brace_format, percent_format

USER = [{"role": "user", "content": "hi " * 1000}]
MEMORY_BYTES = 1 << 26
MILLION = "{% set s = 'a' * 1000000 %}"
LAUGHS = (
    "{% set ns = namespace(l=[1], m=[1]) %}{% for i in range(60) %}"
    "{% set ns.l = [ns.l, ns.l] %}{% set ns.m = [ns.m, ns.m] %}{% endfor %}"
)
"""Sixty small lists that stand for 2^60 numbers."""

VALUES = st.none() | st.booleans() | st.integers(0, 1) | st.floats(0, 1) | st.sampled_from("ab")


def within(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(values, max_size=2) | st.dictionaries(st.sampled_from("ab"), values)


ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "turns left out": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}"
    "{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "calls": "{% set c = cycler(1) %}{% for i in range(99999) %}{% for j in range(99) %}"
    "{{ c.next() }}{% endfor %}{% endfor %}",
    "filters": "{% for i in range(99999) %}{% set x = range(99999)|sum %}{% endfor %}",
    "generators": "{{ range(99999)|map('string')|map('upper')|join|length }}" * 9,
    "tests": MILLION + "{% for i in range(99999) %}{% set x = s is lower %}{% endfor %}",
    "equal texts": MILLION + "{% set t = 'a' * 1000000 %}"
    "{% for i in range(99999) %}{% set x = s == t %}{% endfor %}",
    "unequal texts of one length": MILLION + "{% set t = 'a' * 999999 ~ 'b' %}"
    "{% for i in range(99999) %}{% set x = {'a': [s]} != {'a': [t]} %}{% endfor %}",
    "tests of equality": MILLION + "{% set t = 'a' * 1000000 %}"
    "{% for i in range(99999) %}{% set x = s is eq(t) %}{% endfor %}",
    "a list compared with itself": "{% set l = range(99999)|list %}"
    "{% for i in range(99999) %}{% set x = l == l %}{% endfor %}",
    "lists of lists compared": LAUGHS + "{{ ns.l == ns.m }}",
    "searches": MILLION + "{% for i in range(99999) %}{% set x = ('b' ~ i) in s %}{% endfor %}",
    "methods": MILLION + "{% for i in range(99999) %}{% set x = s.count('b') %}{% endfor %}",
    "slices": "{% set l = range(99999)|list %}{% for i in range(99999) %}{% set x = l[1:] %}"
    "{% endfor %}",
    "doubling by ~": "{% set ns = namespace(s='ab') %}{% for i in range(99) %}"
    "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "doubling by +": "{% set ns = namespace(s='ab') %}{% for i in range(99) %}"
    "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubling by capture": "{% set ns = namespace(s='ab') %}{% for i in range(99) %}"
    "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
    "output": "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}",
    "constant text": "{% for i in range(99999) %}" + "x" * 60_000 + "{% endfor %}",
    "lists within lists": LAUGHS,
    "searches in what runs": "{% for i in range(40000) %}{% set x = 'z' in [1]|slice(65536) %}"
    "{% endfor %}",
    "views": "{% set ns = namespace(d={'a': 'x'}) %}{% for i in range(30) %}"
    "{% set ns.d = {'a': ns.d.values(), 'b': ns.d.values()} %}{% endfor %}{{ ns.d|string }}",
    "namespaces": "{% set o = namespace(n=namespace(a='x')) %}{% for i in range(28) %}"
    "{% set o.n = namespace(a=o.n, b=o.n) %}{% endfor %}{{ o.n|string }}",
    "keys": MILLION + "{% set d = {s: 1} %}{{ ([d]*5000)|string }}",
    "backward searches": "{{ ('a'*1000000).rfind('a' ~ 'b' ~ 'a'*500000) }}",
    "backward splits": "{{ ('a'*1000000).rsplit('a' ~ 'b' ~ 'a'*500000) }}",
    "strips": "{{ ('a'*1000000).strip('b'*1000000 ~ 'a') }}",
    "strips by a filter": "{{ ('a'*1000000)|trim('b'*1000000 ~ 'a') }}",
    "arguments of filters": MILLION + "{% for i in range(15000) %}{{ ''|replace(s, '') }}"
    "{% endfor %}",
    "a width in a format": "{{ '%10000000000d'|format(1) }}",
    "a width after %": "{{ '%10000000000d' % 1 }}",
    "a width in braces": "{{ '{:10000000000}'.format(1) }}",
    "a format of many widths": "{{ ('%(a)9999s' * 500000 % {'a': 1})|length }}",
    "a format without fields": LAUGHS + "{{ 'a'.format(ns.l) }}",
    "a list that shows as a format": "{{ ['%10000000000d']|format(1) }}",
    "lists within lists as a text": LAUGHS + "{{ 'a'.replace(ns.l, 'b') }}",
    "many texts joined": MILLION + "{{ [s, s, s, s, s, s, s, s, s, s, s, s]|join|length }}",
}
HUGE = {
    "text": "{{ 'a' * 10000000000 }}",
    "list": "{{ [1] * 10000000000 }}",
    "power": "{{ 9 ** 9 ** 9 }}" * 2 + "{{ 9 ** 99999 }}",
    "product": "{% set ns = namespace(n=9) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}"
    "{% endfor %}",
    "filter": "{{ 'a'|center(10000000000) }}",
    "method": "{{ 'a'.ljust(10000000000) }}",
    "width from elsewhere": "{{ '%*d' % (10000000000, 1) }}",
    "width within a key": "{{ '%((a))10000000000d' % {'(a)': 1} }}",
    "nested format": "{{ '{:{w}}'.format(1, w=10000000000) }}",
    "replaced": MILLION + "{{ s.replace('a', s) }}",
    "filter replaced": MILLION + "{{ s|replace('a', s) }}",
    "joined": MILLION + "{{ s.join(s) }}",
    "replaced by name": MILLION + "{{ s|replace(old='a', new=s) }}",
    "replaced half by name": MILLION + "{{ s|replace('a', new=s) }}",
    "joined as it runs": MILLION + "{{ range(5000)|map('string')|join(s) }}",
    "joined as it runs, by name": MILLION + "{{ range(5000)|map('string')|join(d=s) }}",
    "joined by a method as it runs": MILLION + "{{ s.join(range(5000)|map('string')) }}",
    "joined keys": MILLION + "{{ s.join({'a': 1, 'b': 2, 'c': 3}.keys()) }}" * 9,
    "JSON with long separators": MILLION + "{{ ([1]*5000)|tojson(separators=(s, ':')) }}",
    "JSON with a long indent": MILLION + "{{ ([1]*5000)|tojson(indent=s) }}",
    "lines with a long indent": MILLION + "{{ ('\r'*5000)|indent(s) }}",
    "digits": "{{ ('9'*4000000)|int(base=16) }}",
    "a value shown often by %": MILLION + "{{ ('%(a)s' * 5000 % {'a': s})|length }}",
    "a value shown often in braces": MILLION + "{{ ('{a}' * 5000).format(a=s)|length }}",
    "a value shown often by a filter": MILLION + "{{ ('%(a)s' * 5000)|format(a=s)|length }}",
    "a number shown often": "{{ '%(a)x' * 100000 % {'a': ('f'*4096)|int(base=16)} }}",
    "digits from bytes": "{% set x = (1).from_bytes([255]*1000, 'big') %}",
    "constants": '{{ "' + "%(a)60000s" * 2000 + '"|format(a=1)|length }}',
    "padding": "{{ [1]|batch(10000000000, 'x')|list }}",
    "precision": "{{ 1|round(1000000000) }}",
    "indent": "{{ ('\\n' * 1000000)|indent(60000) }}",
    "indented JSON": "{{ [[[1]]]|tojson(indent=60000) }}",
    "bytes": "{{ (1).to_bytes(10000000000, 'big') }}",
    "tabs": "{{ ('\\t' * 1000000).expandtabs(60000) }}",
    "lists added": "{{ [[1], [2]]|sum(start=[]) }}",
    "prose": "{{ lipsum(n=1000000) }}",
}


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_would_not_end_is_refused(name: str) -> None:
    template = ChatTemplate(ENDLESS[name], {})
    with pytest.raises(ChatTemplateError, match=r"it takes more than [0-9]+ steps"):
        template.render(USER)


@contextmanager
def within_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MEMORY_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", HUGE)
def test_what_would_be_huge_is_refused_before_it_is_made(name: str) -> None:
    with within_memory(), pytest.raises(ChatTemplateError):
        ChatTemplate(HUGE[name], {}).render(USER)


def test_lines_deep_in_json_are_refused_before_they_are_made() -> None:
    deep: list[Any] = [1] * 50_000
    for _ in range(350):
        deep = [deep]
    template = ChatTemplate("{{ tools|tojson(indent=4) }}", {})
    with within_memory(), pytest.raises(ChatTemplateError, match="it takes more than"):
        template.render(USER, tools=[{"deep": deep}])
    assert len(template.render(USER, tools=[{"flat": [1] * 50_000}])) > 100_000


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("""{{ '{{"name": "{}"}}'.format(x) }}""", '{"name": "hi"}'),
        ("""{{ '{"a": {"b": "%s"}}' % x }}""", '{"a": {"b": "hi"}}'),
        ("""{{ '{"a": {"b": "%s"}}'|format(x) }}""", '{"a": {"b": "hi"}}'),
        ("{{ 'Cutoff 20240630: %s' % x }}", "Cutoff 20240630: hi"),
        ("{{ '%s%%*' % x }}", "hi%*"),
        ("{{ '%5.1f %% * '|format(3) }}", "  3.0 % * "),
        ("{{ '%(a).2f %(b)-4s.'|format(a=1.5, b='*') }}", "1.50 *   ."),
        ("{{ '{:>4}{a:.1f}{{9999999}}'.format(x, a=1) }}", "  hi1.0{9999999}"),
        ("{{ x|truncate(100000) }}", "hi"),
        ("{{ x.find('h', 0, 100000) }}", "0"),
    ],
)
def test_digits_and_braces_of_a_text_are_no_widths(template: str, text: str) -> None:
    assert ChatTemplate(template, {}).render(USER, variables={"x": "hi"}) == text


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ ', '.join(x.keys()) }}/{{ '-'.join(x.values()|map('upper')) }}", "a, b/C-D"),
        ("{{ x|join('+') }}{{ x.items()|map('last')|join(d='+') }}", "a+bc+d"),
        ("{{ x|items|list }}{{ x|reverse|list }}", "[('a', 'c'), ('b', 'd')]['b', 'a']"),
        ("{{ 'c' in x.values() }}{{ 'c' in x|map('upper') }}", "TrueFalse"),
        (
            "{{ [x]|tojson(indent='\t', separators=(',', ':')) }}",
            '[\n\t{\n\t\t"a":"c",\n\t\t"b":"d"\n\t}\n]',
        ),
        ("{{ ' a</think>\nb '.rsplit('</think>', 1)[-1].strip('\n ') }}", "b"),
        ("{{ ' a '|trim }}{{ '--a'|trim('-') }}{{ '12'|int + '1f'|int(base=16) }}", "aa43"),
        ("{{ 'abab'|replace('a', new='c') }}{{ 'a\nb'|indent(2, first=true) }}", "cbcb  a\n  b"),
    ],
)
def test_what_templates_do_with_texts_and_lists_is_jinjas(template: str, text: str) -> None:
    assert ChatTemplate(template, {}).render(USER, variables={"x": {"a": "c", "b": "d"}}) == text


def python_says(text: str, way: str) -> str:
    if "format" in way:
        return text.format("hi", r="hi")
    return text % (("hi", "hi") if "," in way else "hi")


@given(
    st.text(alphabet="%()*.{}:!<0123456789#- rs", max_size=12),
    st.sampled_from(["{{ f % x }}", "{{ f % (x, x) }}", "{{ f.format(x, r=x) }}"]),
)
def test_a_format_says_what_python_says_or_is_refused(text: str, way: str) -> None:
    template = ChatTemplate(way, {})
    size = brace_format if "format" in way else percent_format
    try:
        made = template.render(USER, variables={"f": text, "x": "hi"})
    except ChatTemplateError:
        return
    try:
        assert made == python_says(text, way)
    except AttributeError:  # Jinja shows nothing for it
        assert "." in text
    fields, characters = size(text)
    assert len(made) <= characters + 2 * fields


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ self.__init__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ x.format.__self__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ ('{0.__class__.__mro__}'|format)(1) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update({}) }}",
        "{{ count_turn(0) }}",
    ],
)
@pytest.mark.parametrize("x", ["text", {"format": {"__self__": 1}}])
def test_a_template_reaches_nothing_but_what_it_is_given(template: str, x: Any) -> None:
    try:
        text = ChatTemplate(template, {}).render(USER, variables={"x": x})
    except ChatTemplateError:
        return
    assert text in ("", "1"), "a name that is not there, or a value of the request's own"


KIND = (
    "{{ bos_token }}{% for m in messages %}{{ m.role ~ ': ' ~ m.content }}{% endfor %}"
    "{% for key in extra %}{{ extra[key]|tojson }}{% endfor %}{{ thinking }}"
)


@pytest.mark.parametrize(
    "variables",
    [
        {"raise_exception": 1, "strftime_now": None, "range": [], "namespace": "x"},
        {"environment": 1, "context": 2, "self": 3, "loop": 4, "resolve": 5, "undefined": 6},
        {"bos_token": {"a": 1}, "extra": {"__class__": "{{ 1 / 0 }}"}},
        {"extra": {str(i): i for i in range(3000)}},
        {"thinking": "{% for %}"},
        {"": 1, "a b": 2, "{{": 3, "é": 4},
    ],
)
def test_a_requests_variables_are_values_and_no_code(variables: dict[str, Any]) -> None:
    text = ChatTemplate(KIND, {"bos_token": "<s>"}).render(USER, variables=variables)
    assert "user: hi hi" in text
    for value in variables.values():
        if isinstance(value, str) and "{" in value:
            assert value in text


def test_what_a_request_asks_of_a_loop_is_bounded() -> None:
    template = ChatTemplate(
        "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}", {}
    )
    assert template.render(USER, variables={"n": 100}) == ""
    for n in (2000, 10**30, "x", None, []):
        with pytest.raises(ChatTemplateError):
            template.render(USER, variables={"n": n})


def test_the_longest_conversations_have_room() -> None:
    """The bounds grow with what there is to say: a million tokens, or the most messages."""
    template = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'user' and not m.content.startswith('<') %}"
        "{{ '<user>' + m.content|trim }}{% elif '</think>' in m.content %}"
        "{{ m.content.split('</think>')[-1].lstrip() }}{% else %}{{ m.content }}{% endif %}"
        "{{ '\\n' ~ loop.index0 }}{% endfor %}",
        {},
    )
    long = [{"role": "user", "content": "word " * 1_000_000}]
    assert len(template.render(long)) > 4_000_000
    many = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b</think>c"}] * 4096
    assert template.render(many).count("\n") == 8192


MISTRAL = (
    "{% set users = messages|selectattr('role', 'equalto', 'user')|list %}{% for m in messages %}"
    "{% if m.role == 'user' and m == users[-1] %}{{ tools|tojson }}{% endif %}{{ m.content }}"
    "{% endfor %}"
)


def test_a_short_side_makes_a_comparison_cheap() -> None:
    """Mistral's template looks in each turn whether the message is the last of the user's."""
    turns = [USER[0], {"role": "assistant", "content": "so"}] * 100
    messages = [*turns, {"role": "user", "content": "word " * 80_000}]
    made = ChatTemplate(MISTRAL, {}).render(messages, tools=[{"type": "function"}])
    assert made.count('[{"type": "function"}]') == 1
    assert made.endswith("word ")


@given(st.recursive(VALUES, within), st.recursive(VALUES, within))
def test_equality_is_pythons(left: Any, right: Any) -> None:
    template = ChatTemplate("{{ l == r }}{{ l != r }}{{ l is eq(r) }}{{ l is ne(r) }}", {})
    made = template.render(USER, variables={"l": left, "r": right})
    assert made == f"{left == right}{left != right}" * 2


@pytest.mark.parametrize("name", ["wordwrap(1)", "urlize"])
def test_filters_that_take_the_square_of_a_text_are_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match=f"No filter named '{name.partition('(')[0]}'"):
        ChatTemplate("{{ messages[0].content|" + name + " }}", {})


def test_one_rendering_takes_nothing_from_the_next() -> None:
    template = ChatTemplate("{% for i in range(90000) %}{% endfor %}x", {})
    assert [template.render(USER) for _ in range(3)] == ["x"] * 3
