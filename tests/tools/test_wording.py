"""The check of wording finds glossary phrases and docstrings without a noun, where people read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.wording import PHRASES, file_finds, finds, main

MODULE = '''"""In units of seconds."""

LIMIT = 3
"""So long may it take."""
KEY = "told"


def wait() -> None:
    """Wait for the peer.

    Nothing is gone on with.
    """
    # But for one, all are closed.
    raise ValueError(f"{KEY} is what nobody knows", "of whom it is said")
'''


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("these cannot be told apart", ["cannot be told apart"]),
        ("an hour\n    so long", ["so long"]),
        ("A so-manyth part, and Nobody saw it", ["so-manyth", "nobody"]),
        ("so long as it runs, so that one wins, own and here, sold apart", []),
    ],
)
def test_phrases_are_found_over_line_breaks_and_common_words_are_not(text: str, found: list[str]) -> None:
    assert list(finds(text)) == found


def test_a_docstring_begins_with_no_preposition() -> None:
    assert list(finds("Of one log.", docstring=True)) == ["begins with Of"]
    assert list(finds("Of one log.")) == []
    assert list(finds("Inside, offered, Formal.", docstring=True)) == []


def test_docstrings_comments_and_messages_of_a_module_are_read_but_not_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(MODULE)
    assert sorted(file_finds(path)) == [
        (1, "begins with In"),
        (4, "so long"),
        (9, "gone on with"),
        (13, "but for"),
        (14, "nobody"),
        (14, "of whom"),
    ]


def test_a_page_is_read_without_its_code(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("# A page\n\n```\nso many\n```\nso much\n")
    assert list(file_finds(path)) == [(6, "so much")]


def test_each_phrase_has_advice_and_none_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(PHRASES.values())
    assert main() == 0, capsys.readouterr().out
