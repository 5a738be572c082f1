"""``python -m tools.wording``: find phrases that a reader has to read twice, and docstrings without a noun.

Part of ``make lint``, for README, docs and kvbench.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parent.parent
PHRASES: Final[Mapping[str, str]] = {
    r"can(?:not| not|'t) be told apart|told apart": "no significant difference",
    r"(?:cannot|could not) be told|not told": "unknown, inconclusive",
    r"(?:is|are|was|were|be|been|as|told by|than) told|told by": "reported, given; as a column: source",
    r"tells? (?:of|how|what|which|whether|where|who|why)": "reports, shows",
    r"but for|beside": "except; besides, next to",
    r"so (?:long|many|much|few|often|late|early)(?! as\b| that\b)|so-manyth": "name the number",
    r"as long as all is well|none (?:as long as|where)": "let the type say 'or None'",
    r"(?:go|goes|going|gone|went) on with": "continue, resume",
    r"(?:of|for|to|by|with|from) whom|by what": "name it",
    r"(?:is|are|was|were) to be found|stands? (?:in|at) |lies? (?:in|at) ": "is in",
    r"(?:came|come|comes|coming) about": "measured, arrived",
    r"nobody|anybody|somebody|anyone|whoever": "name who",
    r"mend(?:s|ed|ing)?": "fix",
    r"(?:lies|lying|lie) about": "buffered, left over",
    r"believed?|believes": "trust, verify",
    r"on wish|wish(?:es|ed)?": "optional",
    r"(?:that|which) (?:is|are) none|of no use|in vain|worth anything": "invalid, useless",
    r"reckon(?:s|ed|ing)?|anew|hardly|what ails|hiccup|thereby": "plain word: compute, again, rarely",
    r"the luck of|neighbours fare": "arrival variance, correlated requests",
    r"(?:is|are|was|be) (?:sure|asked)|asked (?:of|for)|asks (?:of|for)": "certain; requested, required",
    r"at a look|by then|of itself|gives? up on": "say when, or what does it",
    r"gates that saw nothing": "checks not run; imported, read",
}
"""Phrase (a regular expression between word boundaries) → what to write instead."""

PREPOSITIONS: Final = (
    "About|After|Among|As|At|Before|Beside|Between|By|During|For|From|In|Into|Of|On|Over|Since|Through"
    "|To|Under|Until|With|Within|Without"
)
"""A docstring that begins with one of these lacks the noun that it describes."""

EXCEPTIONS: Final[Mapping[str, str]] = {"able about above across act": "words of chat prompts, not prose"}
"""Part of a text → why a phrase in it stays."""

_PHRASE = re.compile("|".join(rf"\b(?:{phrase})\b" for phrase in PHRASES), re.IGNORECASE)
_PREPOSITION = re.compile(rf"(?:{PREPOSITIONS})\b")


def finds(text: str, *, docstring: bool = False) -> Iterator[str]:
    """Yield each glossary phrase of a text, and the preposition with which a docstring begins."""
    if docstring and (first := _PREPOSITION.match(text.strip())):
        yield f"begins with {first[0]}"
    if any(part in text for part in EXCEPTIONS):
        return
    yield from (found[0].lower() for found in _PHRASE.finditer(" ".join(text.split())))


def python_texts(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield line, text and whether it is a docstring: docstrings, comments, and literals with a space."""
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        for statement in getattr(node, "body", None) or () if not isinstance(node, ast.expr) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                docstrings.add(statement.value)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, node.value, node in docstrings
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, False


def file_finds(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and find of a module or a Markdown page (its code is skipped)."""
    text = path.read_text()
    if path.suffix == ".py":
        for line, part, docstring in python_texts(text):
            yield from ((line, found) for found in finds(part, docstring=docstring))
        return
    prose = re.sub(
        r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE
    )
    for line, part in enumerate(prose.splitlines(), 1):
        yield from ((line, found) for found in finds(re.sub(r"`[^`]+`", "`", part)))


def main() -> int:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    paths = [*pages, *sorted((ROOT / "kvbench").rglob("*.py"))]
    problems = [
        f"{path.relative_to(ROOT)}:{line}: {found}" for path in paths for line, found in file_finds(path)
    ]
    print(*(problems or ["The wording is plain."]), sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
