"""A jinja2 sandbox in which a hostile chat template can neither reach Python nor hang or fill the server.

Owns the limits; knows nothing of messages. How: every loop turn, call and filter ticks a budget with a deadline; every
operation that can make a value grow is checked before (numbers, repetition) or after (text and containers), so each single
step is short. Invariant: no value a template holds is larger than `MAX_VALUE` when measured as a tree.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any, cast

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.filters import FILTERS
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000
MAX_SECONDS = 5.0
MAX_VALUE = 16 * 1024 * 1024  # characters and elements of one value
ELEMENT_SIZE = 16  # what a list entry counts, beside its text
MAX_TOTAL = 256 * 1024 * 1024  # of all values made in one rendering
MAX_NUMBER_BITS = 4096
MAX_RANGE = 100_000
MAX_WIDTH = 10_000

_FILTERS = [
    "abs",
    "capitalize",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "first",
    "float",
    "format",
    "forceescape",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "sort",
    "string",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
    "wordcount",
]
_TEXT_METHODS = frozenset(
    [
        "capitalize",
        "casefold",
        "count",
        "endswith",
        "find",
        "format",
        "index",
        "isalnum",
        "isalpha",
        "isascii",
        "isdecimal",
        "isdigit",
        "islower",
        "isnumeric",
        "isspace",
        "istitle",
        "isupper",
        "join",
        "lower",
        "lstrip",
        "partition",
        "removeprefix",
        "removesuffix",
        "replace",
        "rfind",
        "rindex",
        "rpartition",
        "rsplit",
        "rstrip",
        "split",
        "splitlines",
        "startswith",
        "strip",
        "swapcase",
        "title",
        "upper",
    ]
)


class TemplateLimitError(jinja2.TemplateError):
    """A template did more than any chat template needs to."""


class Budget:
    """What one rendering may still do."""

    def __init__(self) -> None:
        self._steps = 0
        self._total = 0
        self._deadline = time.monotonic() + MAX_SECONDS

    def tick(self) -> None:
        """One loop turn, call or filter."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise TemplateLimitError(f"it took more than {MAX_STEPS} steps")
        if time.monotonic() > self._deadline:
            raise TemplateLimitError(f"it took more than {MAX_SECONDS:g} s")

    def spend(self, size: int) -> None:
        """A new value of this size."""
        self._total += size
        if size > MAX_VALUE or self._total > MAX_TOTAL:
            raise TemplateLimitError("it builds values that are too large")


# The rendering that runs in this thread. While a template is compiled (constants are folded) there is none.
_current: ContextVar[Budget | None] = ContextVar("chat template budget", default=None)


def render_within(template: jinja2.Template, variables: dict[str, Any], max_output: int) -> str:
    """Renders with a fresh budget; TemplateLimitError past a limit, other jinja2 or Python errors as they come."""
    budget = Budget()
    token = _current.set(budget)
    try:
        pieces = []
        size = 0
        for piece in template.generate(variables):
            budget.tick()
            size += len(piece)
            if size > max_output:
                raise TemplateLimitError(f"its output is longer than {max_output} characters")
            pieces.append(piece)
        return "".join(pieces)
    finally:
        _current.reset(token)


def _tick() -> None:
    if (budget := _current.get()) is not None:
        budget.tick()


def _checked(value: Any) -> Any:
    """`value`, once it is known to be small enough."""
    if isinstance(value, (str, list, tuple, dict)):
        size = _size(value)
        if (budget := _current.get()) is not None:
            budget.spend(size)
        elif size > MAX_VALUE:
            raise TemplateLimitError("it builds values that are too large")
    return value


def _size(value: Any) -> int:
    """Characters and elements of a value as a tree; stops counting past the limit."""
    if isinstance(value, str):
        return len(value)
    total = 0
    stack = [value]
    while stack and total <= MAX_VALUE:
        item = stack.pop()
        total += ELEMENT_SIZE
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, Namespace):
            raise TemplateLimitError("a namespace can't be kept in a list or mapping")
    return total


def _check_width(template: str, values: Iterable[Any]) -> None:
    """Refuses format strings and arguments that ask for very wide fields."""
    if re.search(r"\d{5,}", template):
        raise TemplateLimitError(f"a field is wider than {MAX_WIDTH}")
    _check_numbers(values)


def _check_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise TemplateLimitError(f"{value} is above {MAX_WIDTH}")


def _check_replace(text: str, old: str, new: str) -> None:
    if len(text) + text.count(old) * len(new) > MAX_VALUE:
        raise TemplateLimitError("it builds values that are too large")


def _check_join(separator: str, items: list[Any]) -> None:
    if _size(items) + len(separator) * len(items) > MAX_VALUE:
        raise TemplateLimitError("it builds values that are too large")


def _printable(value: Any) -> Any:
    """`value` if its text is the same every time; an object's address must not end up in a prompt."""
    plain = (str, int, float, list, tuple, dict, jinja2.Undefined)
    if value is None or isinstance(value, plain):
        return value
    raise jinja2.TemplateError(f"it prints a value of type {type(value).__name__}")


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that ticks, and whose arguments and result are looked at. Keeps jinja2's marks on the function."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        _tick()
        if name in ("indent", "round", "tojson", "truncate"):
            _check_numbers([*args[1:], *kwargs.values()])
        elif name == "format":
            _check_width(args[0], [*args[1:], *kwargs.values()])
        return _checked(function(*args, **kwargs))

    return run


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _tick()
        yield item


def _concatenate(items: list[Any]) -> str:
    return "".join([str(_printable(item)) for item in items])


def _join(value: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        raise jinja2.TemplateError("join with an attribute is not supported: use map first")
    items = [str(_printable(item)) for item in value]
    _check_join(str(d), items)
    return str(d).join(items)


def _replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    given, old, new = str(_printable(text)), str(old), str(new)
    _check_replace(given, old, new)
    return given.replace(old, new, -1 if count is None else count)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's `tojson`: plain JSON, where jinja2's own escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > MAX_RANGE:
        raise TemplateLimitError(f"a range is longer than {MAX_RANGE}")
    return numbers


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    _check_width(pattern, ())
    return datetime.now().strftime(pattern)


class _LimitingTransformer(NodeTransformer):
    """Sends loops, joined text and new containers through filters of ours."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _through("_counted", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _through("_concatenate", nodes.List(node.nodes, lineno=node.lineno))

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        self.generic_visit(node)
        return _through("_checked", node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        self.generic_visit(node)
        return _through("_checked", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return _through("_checked", node) if node.ctx == "load" else node


def _through(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(cast("nodes.Expr", node), name, [], [], None, None, lineno=node.lineno)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates as Hugging Face does, with limits."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            finalize=_printable,
        )
        ours = {"join": _join, "replace": _replace, "tojson": _to_json}
        self.filters = {name: _limited(name, ours.get(name, FILTERS[name])) for name in _FILTERS}
        self.filters["_counted"] = _counted
        for function in (_concatenate, _checked):
            self.filters[function.__name__] = _limited(function.__name__, function)
        self.globals = {
            "range": _range,
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _LimitingTransformer().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """One of `+ * ** %`, refused beforehand where the result would be too large."""
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                repeats = isinstance(value, (str, list, tuple)) and isinstance(times, int)
                if repeats and _size(value) * times > MAX_VALUE:
                    raise TemplateLimitError("it builds values that are too large")
        if operator == "%" and isinstance(left, str):
            _check_width(left, right if isinstance(right, tuple) else [right])
        if isinstance(left, int) and isinstance(right, int):
            bits = (
                left.bit_length() * right
                if operator == "**"
                else left.bit_length() + right.bit_length()
            )
            if bits > MAX_NUMBER_BITS:
                raise TemplateLimitError("it computes with numbers that are too large")
        return _checked(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function, macro or method that the template names."""
        _tick()
        method = getattr(function, "__wrapped__", function)
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            name = method.__name__
            if name not in _TEXT_METHODS:
                raise jinja2.TemplateError(f"the string method {name} is not available")
            if name == "replace":
                return _checked(_replace(text, *args, **kwargs))
            if name == "join":
                return _checked(_join(args[0], text))
            if name == "format":
                _check_width(text, [*args, *kwargs.values()])
        return _checked(super().call(context, function, *args, **kwargs))
