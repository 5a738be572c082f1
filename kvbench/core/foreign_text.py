"""Untrusted text from servers, logs and files.

Terminal control sequences are removed where text comes in and again where it goes out (``visible``). Output
escapes markup (``markdown_words``, ``fenced``) and formulas (``spreadsheet_cell``); in HTML jinja2
escapes."""

from __future__ import annotations

import re
from typing import Any, Final

_SEQUENCE: Final = (
    r"(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,8}[@-~]"
    r"|\x1b\][^\x07\x1b\x9c\n]{0,256}(?:\x07|\x1b\\|\x9c)"
)
"""CSI and OSC sequences (ECMA-48): colours, titles, links."""
_CONTROLS: Final = re.compile(
    rf"{_SEQUENCE}|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)
"""C0 except tab and newline, DEL, C1, and characters that change direction or line invisibly."""
_PUNCTUATION: Final = r"[!-/:-@\[-`{-~]"
_MARKS: Final = re.compile(
    rf"\\(?={_PUNCTUATION})"  # would undo the next mark's backslash
    r"|<(?=[A-Za-z/!?])"  # HTML, and links in angle brackets
    r"|(?<=\])[(:]"  # links, pictures, and what they are defined by
)
_NUMBER: Final = r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?\s*%?$"
_FORMULA: Final = re.compile(rf"\s*(?:[=+@\uff1d\uff0b\uff0d\uff20]|-(?!{_NUMBER}))")
"""Cell beginnings that a spreadsheet evaluates (OWASP, CSV injection), except negative numbers."""


def visible(text: str) -> str:
    """Return the text without terminal control sequences; tabs and line breaks stay."""
    if text.isprintable():  # as most texts are; what is left out below is not
        return text
    return _CONTROLS.sub("", text.replace("\r\n", "\n"))


def visible_values(value: Any) -> Any:
    """Apply ``visible`` to all texts of a JSON value; too deeply nested ones stay."""
    try:
        return _visible_values(value)
    except RecursionError:
        return value


def _visible_values(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {
            visible(str(key)): part if isinstance(part, (int, float)) else _visible_values(part)
            for key, part in value.items()
        }
    return [_visible_values(part) for part in value] if isinstance(value, list) else value


def markdown_words(text: str) -> str:
    return _MARKS.sub(lambda found: "&lt;" if found[0] == "<" else f"\\{found[0]}", visible(text))


def fenced(text: str) -> str:
    """Return code in a Markdown fence longer than any inside."""
    longest = max((len(found) for found in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{visible(text)}\n{fence}"


def spreadsheet_cell(value: Any) -> Any:
    """Return a CSV value on one line; formulas get an apostrophe."""
    if isinstance(value, str):
        line = visible(re.sub(r"[\r\n\0]+", " ", value))
        return f"'{line}" if _FORMULA.match(line) else line
    return "" if value is None else value
