"""Output where the locale is not UTF-8: signs that it cannot show become plain ones; nothing breaks off."""

from __future__ import annotations

import codecs
import sys
from io import TextIOWrapper
from typing import Final

PLAIN: Final = {
    "≤": "<=", "≥": ">=", "·": "-", "×": "x", "→": "->", "←": "<-", "–": "-", "—": "-", "…": "...", "•": "*",
    "±": "+-", "µ": "u", "─": "-", "│": "|", "⁹": "^9", "⁻": "-", "³": "^3", "²": "^2", "“": '"', "”": '"',
    "’": "'", "‘": "'", "▶": ">", "✓": "ok",
}  # fmt: skip
NAME: Final = "kvbench-plain"


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    unknown = error.object[error.start : error.end]
    return "".join(PLAIN.get(sign, "?") for sign in unknown), error.end


def allow_any_locale() -> None:
    """From now on stdout and stderr take every sign; in a UTF-8 locale nothing changes."""
    codecs.register_error(NAME, _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors=NAME)
