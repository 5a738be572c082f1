"""Words of others: of servers, logs, and files that may come from anywhere.

They lose what a terminal obeys where they come in and, since a run folder may come from anywhere too, where
they go out (``visible``). Where they go out, what they hold is no markup (``markdown_words``, ``fenced``) and
no formula (``spreadsheet_cell``); in HTML, jinja2 escapes them.
"""

from __future__ import annotations

import re
from typing import Any, Final

_SEQUENCE: Final = (
    r"(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,8}[@-~]"
    r"|\x1b\][^\x07\x1b\x9c\n]{0,256}(?:\x07|\x1b\\|\x9c)"
)
"""CSI and OSC (ECMA-48), whole: colours, titles, links."""
_CONTROLS: Final = re.compile(
    rf"{_SEQUENCE}|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)
"""And C0 but tab and newline, DEL, C1, and what turns the direction of writing or begins a line unseen."""
_PUNCTUATION: Final = r"[!-/:-@\[-`{-~]"
_MARKS: Final = re.compile(
    rf"\\(?={_PUNCTUATION})"  # would undo the next mark's backslash
    r"|<(?=[A-Za-z/!?])"  # HTML, and links in angle brackets
    r"|(?<=\])[(:]"  # links, pictures, and what they are defined by
)
_NUMBER: Final = r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?\s*%?$"
_FORMULA: Final = re.compile(rf"\s*(?:[=+@\uff1d\uff0b\uff0d\uff20]|-(?!{_NUMBER}))")
"""Beginnings that a spreadsheet computes (OWASP, CSV injection); a negative number is none."""


def visible(text: str) -> str:
    """The text without what a terminal would obey; tabs and line breaks stay."""
    if text.isprintable():  # as most texts are; what is left out below is not
        return text
    return _CONTROLS.sub("", text.replace("\r\n", "\n"))


def visible_values(value: Any) -> Any:
    """A JSON value with all its texts as ``visible`` has them; one nested too deep stays as it is."""
    try:
        return _visible_values(value)
    except RecursionError:
        return value


def _visible_values(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {visible(str(key)): _visible_values(each) for key, each in value.items()}
    return [_visible_values(each) for each in value] if isinstance(value, list) else value


def markdown_words(text: str) -> str:
    """The text for Markdown, reading as it is: no HTML, no link and no picture begins in it."""
    return _MARKS.sub(lambda found: "&lt;" if found[0] == "<" else f"\\{found[0]}", visible(text))


def fenced(text: str) -> str:
    """Code for Markdown, in a fence that is longer than any in it."""
    longest = max((len(found) for found in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{visible(text)}\n{fence}"


def spreadsheet_cell(value: Any) -> Any:
    """A value for CSV, on one line; what a spreadsheet would take for a formula gets an apostrophe."""
    if isinstance(value, str):
        line = visible(re.sub(r"[\r\n\0]+", " ", value))
        return f"'{line}" if _FORMULA.match(line) else line
    return "" if value is None else value
