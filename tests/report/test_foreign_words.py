"""What others wrote into a run folder or answered commands no terminal, and is no markup and no formula."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from commands import invoke
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.live import Live
from rich.text import Text
from sample_run import make_run

from kvbench.cli.visible_console import VisibleConsole
from kvbench.core.foreign_text import fenced, markdown_words, spreadsheet_cell, visible
from kvbench.hosts.log_tail import tail_of
from kvbench.processes.loadgen.stream import clip
from kvbench.report.report import write_report

OBEYED = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
PLANTED = (
    "\x1b[31mred\x1b]0;title\x07\x1b]8;;http://evil.example\x1b\\link\x9b2J\x90q\x9c\x7f\u202eback"
    "<img src=x onerror=alert(1)> \\<img src=y> ![p](http://evil.example/p) \\![p](http://evil.example/q)"
    " [click](javascript:alert(1)) <http://evil.example/a> <!-- c --> | ``` `code` [x]: http://evil.example"
)
WORDS = (
    *("needs an NVIDIA driver", "the engine fell behind its model", "use a quieter machine",
      "kvbench doctor"),
    *("Example CPU 9000", "node-a", "corrupt: 1 of 4", "look into logs", "ucx: tcp"),
)  # fmt: skip
MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable("table")


def tokens(text: str) -> list[tuple[str, str]]:
    """HTML, links and pictures of a Markdown text, with where they lead."""
    found = []
    for block in MARKDOWN.parse(text):
        for token in [block, *(block.children or ())]:
            if token.type in ("html_block", "html_inline", "link_open", "image"):
                leads = token.attrs.get("href") or token.attrs.get("src") or token.content
                found.append((token.type, str(leads)))
    return found


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with planted words wherever it has words, and its reports."""
    folder = make_run(tmp_path_factory.mktemp("hostile"), special=True)
    planted = json.dumps(PLANTED)[1:-1]
    for name in ("trials.jsonl", "cells.jsonl", "plan.json", "manifest.json", "environment.json"):
        text = (folder / name).read_text()
        for word in WORDS:
            text = text.replace(word, f"{word} {planted}")
        text = text.replace('"nixl"', f'"nixl {planted}"').replace('"quickstart"', f'"quickstart {planted}"')
        (folder / name).write_text(text)
    write_report(folder, ("md", "html", "csv", "json"))
    return folder


def test_no_file_that_people_open_holds_what_is_obeyed(hostile: Path) -> None:
    files = [*hostile.glob("report.*"), *hostile.glob("tables/*.csv")]
    assert len(files) >= 4
    assert any("evil" in file.read_text() for file in files)
    for file in files:
        assert OBEYED.findall(file.read_text().replace("\r\n", "\n")) == [], file


@pytest.mark.parametrize("words", [("report",), ("compare",), ("export", "--format", "prometheus")])
def test_no_terminal_is_commanded(hostile: Path, words: tuple[str, ...]) -> None:
    done = invoke(words[0], str(hostile), *words[1:])
    assert "evil.example" in done.text
    assert OBEYED.findall(done.text) == []


def test_markdown_has_no_html_and_leads_nowhere(hostile: Path) -> None:
    text = (hostile / "report.md").read_text()
    assert "evil.example" in text
    assert [token for token in tokens(text) if token[0] != "image"] == []
    assert [token for token in tokens(text) if not token[1].startswith("figures/")] == []


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.images: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag in ("img", "iframe", "object"):
            self.images.append(tag)


def test_html_has_no_tag_of_others(hostile: Path) -> None:
    page = Page()
    page.feed((hostile / "report.html").read_text())
    assert page.images == []


def test_an_error_in_words_commands_no_terminal(tmp_path: Path) -> None:
    file = tmp_path / "a\x1b[31m.yaml"
    file.write_text("\x1b]0;t\x07: 1\n")
    assert OBEYED.findall(invoke("plan", str(file)).text) == []


# --- the words themselves ----------------------------------------------------------------------------
@given(st.text(st.sampled_from("\x1b[]m;0\x07\x9b\x9c\\ab\n\t\r\x00\u202e"), max_size=60))
def test_nothing_obeyed_is_left_of_any_text(text: str) -> None:
    assert OBEYED.findall(visible(text)) == []
    assert "\r" not in visible(text)
    assert visible(visible(text)) == visible(text)


def test_colours_titles_and_links_go_whole() -> None:
    assert visible("a\x1b[1;31mb\x1b[0m\x1b]0;t\x07c\x1b]8;;u\x1b\\d\x9b2Je\tf\r\ng") == "abcde\tf\ng"


MARKED = st.text(st.sampled_from("<>!/[]():\\`*ab=\"'| \nhtp."), max_size=60)


@given(MARKED)
def test_no_text_is_markup_in_markdown(text: str) -> None:
    assert tokens(f"- {markdown_words(text)}\n\nand [a] ![b][a]\n") == []


def test_markdown_reads_as_it_was() -> None:
    for text in ("p95 < 200 ms", "a `b` c", "x <b> [y](z) \\< \\", "1 <= 2", "[kv]: 3"):
        inline = MARKDOWN.parseInline(markdown_words(text))[0]
        shown = "".join(child.content for child in inline.children or ())
        assert shown == text.replace("`", "")


@given(st.text(st.sampled_from("`a\n~"), max_size=40))
def test_code_does_not_end_its_fence(text: str) -> None:
    fences = [token for token in MARKDOWN.parse(f"{fenced(text)}\n\nafter") if token.type != "inline"]
    assert [fence.type for fence in fences] == ["fence", "paragraph_open", "paragraph_close"]


@pytest.mark.parametrize("text", [
    "=1+1", "@x", "+1", "-x", "-1+cmd|' /C calc'!A0", "\t=1", " =1", "\x1b=1", "\r=1", "＝1", "-1e5x", "-",
    "\n-a",
])  # fmt: skip
def test_what_a_spreadsheet_would_compute_is_text(text: str) -> None:
    assert str(spreadsheet_cell(text)).startswith("'")


@pytest.mark.parametrize("text", ["-1", "-1.5", "-.5", "-1e-5", "-12 %", "a=1", "1-1", ""])
def test_numbers_and_words_stay(text: str) -> None:
    assert spreadsheet_cell(text) == text


def test_words_of_servers_and_logs_come_in_without_it(tmp_path: Path) -> None:
    assert clip(b"\x1b[31mno\x1b[0m \xc2\x9b2Jway") == "no way"
    log = tmp_path / "a.log"
    log.write_bytes(b"\x1b[31mone\x1b[0m\ntwo\x07\n")
    assert tail_of(log, 5) == ["one", "two"]


def test_the_terminal_keeps_rich_s_own_colours() -> None:
    out = io.StringIO()
    console = VisibleConsole(file=out, force_terminal=True, color_system="standard", width=80)
    console.print(Text("a\x1b[2Jb\x90c", style="red"))
    assert out.getvalue() == "\x1b[31mabc\x1b[0m\n"
    with Live("x", console=console, auto_refresh=False):
        pass
    assert "\x1b[?25l" in out.getvalue()
