"""A document rendered: generated blocks, then quoted numbers; and what is wrong with it, in sentences."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cs336_systems.answers.committed import visible
from cs336_systems.answers.markers import render, stale_blocks
from cs336_systems.answers.quotes import Terms, render_quotes, stale_quotes, without_quotes

Blocks = Mapping[str, Callable[[], str]]


@dataclass(frozen=True)
class Rendered:
    """A document's new text, what changed in it, and what could not be computed."""

    text: str
    stale: list[str]
    problems: list[str]


def render_document(text: str, blocks: Blocks, terms: Terms) -> Rendered:
    """Every block and every quoted number of ``text`` anew; what cannot be computed stays as it is and is a problem."""
    problems = []
    try:
        with_blocks = render(text, blocks)
    except (ValueError, LookupError) as error:
        problems.append(str(error))
        with_blocks = text
    try:
        rendered = render_quotes(with_blocks, terms)
    except ValueError as error:
        problems.append(str(error))
        rendered = with_blocks
    stale = [f"block {name}" for name in stale_blocks(text, with_blocks)] if with_blocks != text else []
    stale += stale_quotes(with_blocks, rendered) if rendered != with_blocks else []
    return Rendered(rendered, stale, problems)


def once(blocks: Blocks) -> dict[str, Callable[[], str]]:
    """Blocks that are computed once however often they stand in documents, and say what is not measured."""
    return {name: functools.cache(visible(block)) for name, block in blocks.items()}


def section(document: Path, heading: str, terms: Terms) -> str:
    """What stands below ``## heading`` in a document, its numbers computed and its quotes taken away.

    One text can so be written in one document and shown in another.

    Raises:
        ValueError: there is no such heading, or a quote cannot be computed.
    """
    _, found, rest = document.read_text().partition(f"\n## {heading}\n")
    if not found:
        raise ValueError(f"{document.name} has no section {heading!r}")
    return without_quotes(render_quotes(rest.partition("\n## ")[0].strip(), terms))
