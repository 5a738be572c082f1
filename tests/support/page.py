"""Reads an HTML page for tests: its tables, headings, ids, what it would fetch, what is not nested."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "br", "link", "img", "input", "hr", "source"}
FETCHING = {"src", "srcset", "data", "poster", "action", "formaction", "background"}


@dataclass
class Table:
    """A table of the page: the CSV it belongs to, its keys and headings, and (text, value) of each cell."""

    csv: str = ""
    keys: list[str] = field(default_factory=list)
    headings: list[str] = field(default_factory=list)
    rows: list[list[tuple[str, str]]] = field(default_factory=list)


class Page(HTMLParser):
    """Parse with ``Page.of(text)``."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.ids: list[str] = []
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.handlers: list[str] = []
        self.headings: list[int] = []
        self.tables: list[Table] = []
        self.pictures: list[dict[str, str]] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.wrong: list[str] = []
        self.policy = ""
        self.title = ""
        self.values: list[str] = []
        self._open: list[str] = []
        self._cell: list[str] | None = None
        self._value: str | None = None
        self._heading = False

    @classmethod
    def of(cls, text: str) -> Page:
        page = cls()
        page.feed(text)
        page.close()
        page.wrong += [f"never closed: {tag}" for tag in page._open]
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self._open.append(tag)
        self._look(tag, {name: value or "" for name, value in attrs})

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._look(tag, {name: value or "" for name, value in attrs})

    def _look(self, tag: str, given: dict[str, str]) -> None:
        if "id" in given:
            self.ids.append(given["id"])
        self.handlers += [name for name in given if name.startswith("on")]
        self.fetched += [f"{tag} {given[name]}" for name in FETCHING & given.keys()]
        for name in ("href", "xlink:href"):
            if name in given:
                self.links.append(given[name])
        if tag == "link":
            self.fetched.append("link")
        if tag == "meta" and given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"]
        if tag in ("h1", "h2", "h3"):
            self.headings.append(int(tag[1]))
        if tag == "table":
            self.tables.append(Table(given.get("data-csv", "")))
        if tag == "tr" and "tbody" in self._open:
            self.tables[-1].rows.append([])
        if tag in ("th", "td"):
            self._cell, self._value = [], given.get("data-v")
            self._heading = given.get("scope") == "col"
            if self._heading:
                self.tables[-1].keys.append(given.get("data-key", ""))
        if tag == "svg":
            self.pictures.append(given)

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if not self._open or self._open.pop() != tag:
            self.wrong.append(f"</{tag}> at {self.getpos()}")
        if tag in ("th", "td") and self._cell is not None:
            text = "".join(self._cell)
            if self._heading:
                self.tables[-1].headings.append(text)
            else:
                plain = "" if text == "–" else text
                self.tables[-1].rows[-1].append((text, plain if self._value is None else self._value))
            self._cell = None

    def handle_data(self, data: str) -> None:
        if self._cell is not None:
            self._cell.append(data)
        if self._open and self._open[-1] == "script":
            self.scripts.append(data)
        if self._open and self._open[-1] == "style":
            self.styles.append(data)
        if self._open and self._open[-1] == "title":
            if "svg" in self._open:
                self.values.append(data)
            else:
                self.title += data

    def table(self, csv: str, columns: int | None = None) -> Table:
        """The table of that CSV: the one with the most columns."""
        return max((table for table in self.tables if table.csv == csv), key=lambda table: len(table.keys))
