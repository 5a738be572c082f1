"""What a picture's marks stand for, in the picture itself: whose they are, and each one's value as text.

A browser shows a mark's ``<title>`` under the pointer, and a page hides what a reader does not want to see by
``data-series``. matplotlib writes an artist's gid as the id of its group, which carries both until the SVG is
written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, unquote

if TYPE_CHECKING:
    from matplotlib.artist import Artist

_PREFIX: Final = "values:"
_GROUP: Final = re.compile(rf'<g id="{_PREFIX}([^"]*)">')
_TAG: Final = re.compile(r"<g\b[^>]*?(/?)>|</g>")
_MARK: Final = re.compile(r"<use\b([^>]*?)\s*/>")


def says(artist: Artist, series: str, *texts: str) -> None:
    """Marks an artist as one of ``series``. ``texts``: one a mark, or one for the whole of it, or none."""
    artist.set_gid(_PREFIX + quote(json.dumps([series, *texts])))


def with_values(svg: str) -> str:
    """The SVG with what was said of its artists: ``data-series`` on groups, a ``<title>`` in each mark."""
    parts, at = [], 0
    for match in _GROUP.finditer(svg):
        series, *texts = json.loads(unquote(match[1]))
        end = _end(svg, match.end())
        inside = svg[match.end() : end]
        parts += [svg[at : match.start()], f'<g data-series="{escape(series)}">', _titled(inside, texts)]
        at = end
    return "".join([*parts, svg[at:]])


def _end(svg: str, start: int) -> int:
    """Where the group ends that begins before ``start``."""
    depth = 1
    for tag in _TAG.finditer(svg, start):
        depth += -1 if tag[0] == "</g>" else not tag[1]
        if not depth:
            return tag.start()
    raise ValueError("a group of the SVG is not closed")


def _titled(inside: str, texts: Sequence[str]) -> str:
    titles = [f"<title>{escape(text, quote=False)}</title>" for text in texts]
    if len(titles) == inside.count("<use "):
        left = iter(titles)
        return _MARK.sub(lambda mark: f"<use{mark[1]}>{next(left)}</use>", inside)
    return titles[0] + inside if len(titles) == 1 else inside
