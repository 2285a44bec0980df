"""What a hostile chat template tries: each attempt ends as an error, soon and without much memory."""

from __future__ import annotations

import pytest

from poise.errors import InvalidRequestError
from poise.tokenizer import template_sandbox
from poise.tokenizer.chat_template import ChatTemplate
from poise.tokenizer.control_tokens import ControlTokens

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "a b"}]


def render(source: str) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}, ControlTokens({})).render(MESSAGES).text


DOUBLE = "{% set ns = namespace(x='aaaaaaaaaaaaaaaa') %}{% for i in range(60) %}{% set ns.x = %s %}{% endfor %}"

HOSTILE = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "long output": "{% for i in range(99999) %}{{ 'aaaaaaaaaaaaaaaaaaaaaaaa' }}{% endfor %}",
    "huge range": "{{ range(10**8) | list }}",
    "repetition": "{{ messages[0]['content'] * 1000000000 }}",
    "list repetition": "{{ messages * 1000000000 }}",
    "doubling with ~": DOUBLE.replace("%s", "ns.x ~ ns.x"),
    "doubling with +": DOUBLE.replace("%s", "ns.x + ns.x"),
    "doubling with *": DOUBLE.replace("%s", "2 * ns.x"),
    "doubling with join": DOUBLE.replace("%s", "[ns.x, ns.x] | join"),
    "doubling with join method": DOUBLE.replace("%s", "''.join([ns.x, ns.x])"),
    "doubling with replace": DOUBLE.replace("%s", "ns.x.replace('a', 'aa')"),
    "doubling with replace filter": DOUBLE.replace("%s", "ns.x | replace('a', 'aa')"),
    "doubling with format": DOUBLE.replace("%s", "'%s%s' % (ns.x, ns.x)"),
    "doubling with format filter": DOUBLE.replace("%s", "'%s%s' | format(ns.x, ns.x)"),
    "doubling with format method": DOUBLE.replace("%s", "'{}{}'.format(ns.x, ns.x)"),
    "nested lists": DOUBLE.replace("%s", "[ns.x, ns.x]") + "{{ ns.x }}",
    "nested mappings": DOUBLE.replace("%s", "{'a': ns.x, 'b': ns.x}") + "{{ ns.x | tojson }}",
    "nested dict calls": DOUBLE.replace("%s", "dict(a=ns.x, b=ns.x)") + "{{ ns.x }}",
    "nested tuples": DOUBLE.replace("%s", "(ns.x, ns.x)") + "{{ ns.x == (ns.x, ns.x) }}",
    "namespaces in lists": "{% set a = namespace() %}{{ [a, a] }}",
    "map of lists": "{{ (messages * 30000) | map('tojson') | map('upper') | list | tojson | tojson }}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "branching recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "power": "{{ 10 ** 100000000 }}",
    "power of a variable": "{{ (messages | length) ** 99999 }}",
    "growing number": "{% set ns = namespace(x=3) %}{% for i in range(90) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "wide format": "{{ '%1000000000d' % 1 }}",
    "wide format filter": "{{ '%*d' | format(1000000000, 1) }}",
    "wide format method": "{{ '{:>1000000000}'.format(1) }}",
    "nested wide format method": "{{ '{:>{w}}'.format(1, w=1000000000) }}",
    "justified": "{{ messages[0]['content'].ljust(1000000000) }}",
    "centred": "{{ messages[0]['content'] | center(1000000000) }}",
    "indented": "{{ messages[0]['content'] | indent(1000000000, true) }}",
    "indented JSON": "{{ messages | tojson(indent=1000000000) }}",
    "tabs": "{{ '\t'.expandtabs(1000000000) }}",
    "rounded": "{{ 1.5 | round(100000000, 'ceil') }}",
    "wide date": "{{ strftime_now('%1000000000d') }}",
    "lipsum": "{{ lipsum(n=100000000) }}",
    "slices": "{{ messages | slice(1000000000) | list }}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attr filter": "{{ '' | attr('__class__') }}",
    "mutation": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "printed object": "{{ range }}",
    "printed namespace": "{{ namespace(a=1) }}",
    "printed generator": "{{ messages | map('upper') }}",
    "syntax": "{% for %}",
    "deep nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "many blocks": "{% if true %}" * 300 + "{% endif %}" * 300,
    "long source": "a" * (1024 * 1024),
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_template_is_refused(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in (("MAX_STEPS", 50_000), ("MAX_VALUE", 1 << 20), ("MAX_TOTAL", 1 << 25)):
        monkeypatch.setattr(template_sandbox, name, limit)
    with pytest.raises(InvalidRequestError, match="chat template"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages.__class__ }}",
        "{{ namespace.__init__ }}{{ dict.__globals__ }}{{ range.__code__ }}",
        "{{ self._TemplateReference__context }}",
    ],
)
def test_internals_are_out_of_reach(source: str) -> None:
    assert render(source) == ""


def test_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.0)
    with pytest.raises(InvalidRequestError, match="more than 0 s"):
        render("{% for m in messages %}{% endfor %}")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{{ loop.index }}{{ loop.last }}{% endfor %}", "1False2True"),
        ("{% for m in messages %}{{ loop.length }}{{ loop.previtem is defined }}{% endfor %}", "2False2True"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}x{% break %}{% endfor %}", "x"),
        ("{% for k, v in messages[0].items() %}{{ k ~ '=' ~ v }};{% endfor %}", "role=user;content=hello;"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% else %}none{% endfor %}", "hello"),
        ("{% for m in [] %}{% else %}none{% endfor %}", "none"),
        ("{% for m in missing %}x{% endfor %}{{ missing }}", ""),
        ("{{ messages[::-1] | map(attribute='role') | join(', ') }}", "assistant, user"),
        ("{{ messages[1].content.split(' ')[-1] + '!' }}{{ 2 + 3 * 2 ** 2 }}", "b!14"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "hello"}'),
        ("{{ {'a': [1, 'é<']} | tojson(indent=2) }}", '{\n  "a": [\n    1,\n    "é<"\n  ]\n}'),
        ("{{ ['a', 'b'] }}{{ ('a',) }}{{ none }}{{ true }}{{ 1.5 }}", "['a', 'b']('a',)NoneTrue1.5"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{% macro show(m) %}[{{ m.role }}]{% endmacro %}{{ show(messages[0]) }}", "[user]"),
        ("{% generation %}x{% endgeneration %}{{ '%s-%d' % ('a', 3) }}{{ '{}'.format('b') }}", "xa-3b"),
        ("  {% if true %}\n  a\n  {% endif %}\nb\n", "  a\nb"),
        ("{{ bos_token + messages[0]['content'] | trim }}{{ eos_token }}", "<s>hello"),
        ("{{ 'a,b'.replace(',', '') }}{{ 'a' in ['a', 'b'] }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "abTrue1"),
    ],
)  # fmt: skip
def test_ordinary_templates_work(source: str, text: str) -> None:
    assert render(source) == text
