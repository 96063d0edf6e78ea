"""Numbers typed by hand in a template's text, where a call should name the row or formula they come from.

A number with a unit, one with decimals, and one of three digits or more count; in prose, headings, lists and tables.
Not read are code (blocks, spans, indented formulas), the handout's questions (paragraphs in italics), comments and
targets of links. Free are settings that anybody can look up: the named models' shapes, powers of two and of ten, and
years, unless a unit follows; versions of software; and what is part of a name, as in H200 or 2.7b. The rest is quoted

    {{ ddp("step", "naive") }} ms                      from rows
    {{ 4 * resolve_size("xl").n_parameters / GIB }}    from arithmetic
    {{ outside("class record") }}                      from outside.csv, which names source and date
    {{ given("10 MB") }}                               what was set and not found: the size of a message, a limit

Constants that nothing is asked with count as well: ``{{ 434 }}``, ``{% set n = 434 %}``, ``{{ "9.3 GiB" }}``.

    for sentence in typed_numbers(read_templates()): print(sentence)
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import astuple

from jinja2 import Environment, nodes

from cs336_systems.answers.arithmetic import LAYER
from cs336_systems.config import MODEL_SIZES
from cs336_systems.costs.parallelism.mesh import XXL

_UNITS = (
    *("ns", "us", "µs", "ms", "s", "seconds?", "minutes?", "hours?", "days?"),
    *("[KMGT]i?B(?:/s)?", "[MG]bit/s", "[kMGT]?FLOPs?(?:/s)?", "tokens/s", "[MG]Hz", "k?W", "%", "per ?cent", "times"),
)
_UNIT = re.compile(rf"(?:\*\*)?[\s\u00a0-]?(?:{'|'.join(_UNITS)})(?![\w/])|[×x](?![\w(])(?! ?\d)| ×(?! ?[\w(])")
_NUMBER = re.compile(r"(?<![\w.,^])(?<![A-Za-z]-)\d(?:[\d,_]*\d)?(?:\.\d+)*")
_SOFTWARE = "torch|triton|python|cuda|cudnn|ptxas|driver|nccl|nsight|nsys|matplotlib"
_PART_OF_MORE = re.compile(rf"(?:(?:{_SOFTWARE})[ -]\(?|[A-Za-z)] ?/ ?)$", re.IGNORECASE)
"""Before a number: the name of software whose version it is, or a letter that it divides."""

_SHAPES = {
    value
    for shape in (*map(astuple, MODEL_SIZES.values()), astuple(LAYER), astuple(XXL.layer))
    for value in shape
    if isinstance(value, (int, float)) and value >= 100
}

_SKIPPED = (
    r"^```.*?^```",  # code
    r"\{%.*?%\}|\{\{.*?\}\}|\{#.*?#\}",  # Jinja's own
    r"`[^`]*`",
    r"<!--.*?-->",
    r"\]\([^)\s]*\)",
    r"https?://\S+",
    r"^(?: {4}|\t).*?$",
    r"^\*(?!\*)(?:(?!\n\n).)*?(?<!\*)\*$",  # a question of the handout
)


def typed_numbers(templates: Mapping[str, str]) -> list[str]:
    """One sentence for each number that is typed by hand, with its template and line."""
    found = []
    for name, text in sorted(templates.items()):
        typed = sorted({*_in_text(text), *_in_calls(text)})
        found += [f"{name}.jinja, line {line}: {number!r} is typed, not quoted" for line, number in typed]
    return found


def _in_text(text: str) -> Iterator[tuple[int, str]]:
    """Numbers of the text between calls: line, and the number with its unit."""
    for pattern in _SKIPPED:
        text = re.sub(pattern, _blank, text, flags=re.MULTILINE | re.DOTALL)
    return ((text.count("\n", 0, start) + 1, number) for start, number in _numbers(text))


def _blank(match: re.Match[str]) -> str:
    """As many lines, of nothing that reads as text."""
    return "\0" + "\n" * match[0].count("\n")


def _numbers(text: str) -> Iterator[tuple[int, str]]:
    for match in _NUMBER.finditer(text):
        unit = _UNIT.match(text, match.end())
        named = not unit and re.match("[A-Za-z_]", text[match.end() : match.end() + 1])
        if named or match[0].count(".") > 1 or _PART_OF_MORE.search(text, 0, match.start()):
            continue
        if unit or not _is_free(match[0]):
            yield match.start(), match[0] + (unit[0] if unit else "")


def _is_free(number: str) -> bool:
    """Whether a number without a unit may be typed."""
    if "." in number:
        return False
    value = int(re.sub("[,_]", "", number))
    power = value & (value - 1) == 0 or (set(str(value)[1:]) == {"0"} and str(value)[0] == "1")
    return value < 100 or power or 1990 <= value < 2040 or value in _SHAPES


def _in_calls(text: str) -> Iterator[tuple[int, str]]:
    """Numbers that an expression shows though no name in it says where they come from, and those in its strings."""
    tree = Environment().parse(text)
    shown: list[nodes.Node] = [node for output in tree.find_all(nodes.Output) for node in output.nodes]
    shown += [assignment.node for assignment in tree.find_all(nodes.Assign)]
    for node in shown:
        constants = [node] if isinstance(node, nodes.Const) else list(node.find_all(nodes.Const))
        if node.find(nodes.Name) is None:
            yield from ((node.lineno, f"{{{{ {each.value} }}}}") for each in constants if _is_number(each.value))
        asked = {id(each) for call in _calls(node) for each in call.find_all(nodes.Const)}
        for each in constants:
            if isinstance(each.value, str) and id(each) not in asked:
                yield from ((each.lineno, number) for _, number in _numbers(each.value))


def _calls(node: nodes.Node) -> Iterator[nodes.Node]:
    """Calls and places in what they return: constants in them ask, and are not shown."""
    kinds = (nodes.Call, nodes.Getitem)
    return (each for each in (node, *node.find_all(kinds)) if isinstance(each, kinds))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
