"""Generated blocks inside prose: tables that are rendered from rows, never typed.

A block stands between ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->``; what is between the two is replaced, the
rest of the file is the author's.
"""

import re
from collections.abc import Callable, Mapping

_BLOCK = re.compile(r"<!-- begin: (?P<name>[\w-]+) -->\n.*?<!-- end: (?P=name) -->", re.DOTALL)
_MARKER = re.compile(r"<!-- (?:begin|end): [\w-]+ -->")


def render(text: str, blocks: Mapping[str, Callable[[], str]]) -> str:
    """``text`` with every block rendered anew.

    Raises:
        ValueError: a marker without its partner, or a name without a renderer.
    """

    def replacement(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in blocks:
            raise ValueError(f"no renderer for block {name!r}: known are {', '.join(blocks)}")
        return f"<!-- begin: {name} -->\n{blocks[name]().strip()}\n<!-- end: {name} -->"

    rendered = _BLOCK.sub(replacement, text)
    if stray := _MARKER.findall(_BLOCK.sub("", text)):
        raise ValueError(f"marker without a partner: {stray[0]}")
    return rendered


def stale_blocks(text: str, rendered: str) -> list[str]:
    """Names of the blocks that rendering has changed."""
    pairs = zip(_BLOCK.finditer(text), _BLOCK.finditer(rendered), strict=True)
    return [old["name"] for old, new in pairs if old[0] != new[0]]
