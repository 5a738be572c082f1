"""YAML text → a tree of values with their lines.

PyYAML's parser provides events only, because every value needs its line, all duplicate keys are reported at
once, and YAML 1.1 reads `on`, `010` and `1:30` as true, 8 and 90. Values that YAML 1.2 reads differently are
refused, with what to write instead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import yaml

MAX_CHARS: Final = 1 << 18  # a hundred times a long scenario
MAX_ALIASES: Final = 8  # enough to reuse a block or two; too few for a document to explode
MAX_DEPTH: Final = 16
_MAX_DIGITS: Final = 40
FAST_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's parser takes a twentieth of the time of PyYAML's own, but not every installation has it."""
_READ_DIFFERENTLY: Final = re.compile("[\t\r\x85\u2028\u2029\ufeff]|(?<![^\\s-])[?](?!\\S)|[|>][-+0-9]*#")
"""Text that libyaml reads differently from PyYAML: tabs, unusual line ends, byte order marks, ``?`` keys, and
comments after a block scalar's indicator."""

Scalar = str | int | float | bool | None
Location = tuple[str | int, ...]
Plain = Scalar | list["Plain"] | dict[str, "Plain"]


@dataclass(frozen=True)
class Where:
    """A line of the file (from 1), or the option that set the value."""

    line: int = 1
    override: str = ""

    def show(self, path: str) -> str:
        return self.override or f"{path}:{self.line}"


@dataclass(frozen=True)
class Node:
    """A value, its place, and its key's place."""

    value: Scalar | list[Node] | dict[str, Node]
    where: Where
    key_where: Where | None = None

    @property
    def label_where(self) -> Where:
        return self.key_where or self.where


@dataclass(frozen=True)
class Mistake:
    """One error: its place, its value, and the text."""

    where: Where
    location: Location
    text: str
    final: bool = True


class _UnreadableError(Exception):
    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line


_TRUE = frozenset({"true", "True", "TRUE"})
_FALSE = frozenset({"false", "False", "FALSE"})
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
_TRAPS: Final = (
    (
        re.compile(r"(?:yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF)"),
        "is true or false for some YAML readers and text for others; write true or false, or quote it",
    ),
    (
        re.compile(r"[-+]?0[0-9_]+"),
        "has a leading zero, which some YAML readers take for octal; drop the zero, or quote it",
    ),
    (re.compile(r"[-+]?0[xob][0-9a-fA-F_]+"), "is not a decimal number; write it in decimal, or quote it"),
    (
        re.compile(r"[-+]?[0-9]+_[0-9_]*(?:\.[0-9_]*)?"),
        "has underscores between its digits; write the digits alone, or quote it",
    ),
    (
        re.compile(r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?"),
        "is a base-60 number for some YAML readers; write a plain number, or quote it",
    ),
    (re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"), "is not a number that can be used here"),
)


def shorten(value: object, limit: int = 60) -> str:
    """Return a value as a message shows it."""
    shown = "an empty value" if value is None else repr(value)
    if isinstance(value, bool):
        shown = str(value).lower()
    return shown if len(shown) <= limit else shown[: limit - 2] + "…" + shown[-1]


def quoted(word: str, limit: int = 60) -> str:
    """Return a key or word of the file as a message shows it."""
    shown = word if word.isprintable() else repr(word)
    return f"`{shown if len(shown) <= limit else shown[: limit - 1] + '…'}`"


def read_yaml(text: str, override: str = "") -> tuple[Node | None, list[Mistake]]:
    """Return one YAML document as a tree, with its mistakes; the tree is None for unreadable text.

    An invalid value is in the tree as its text."""
    if len(text) > MAX_CHARS:
        return None, [Mistake(Where(1, override), (), f"is longer than {MAX_CHARS // 1024} KiB")]
    if not _READ_DIFFERENTLY.search(text):
        with suppress(_UnreadableError, yaml.YAMLError, ValueError, OverflowError):
            builder = _Builder(override)
            return builder.document(yaml.parse(str(text), Loader=FAST_LOADER)), builder.mistakes
    # Again by PyYAML's own parser, whose messages users get on every machine.
    builder = _Builder(override)
    try:
        return builder.document(yaml.parse(text, Loader=yaml.SafeLoader)), builder.mistakes
    except _UnreadableError as problem:
        line, message = problem.line, str(problem)
    except yaml.MarkedYAMLError as problem:
        line, message = _syntax(problem)
    except yaml.reader.ReaderError as problem:
        line = text.count("\n", 0, problem.position) + 1
        message = f"YAML syntax: the character U+{_code(problem.character):04X} is not allowed"
    except (ValueError, OverflowError):
        # PyYAML lets these through for escapes beyond Unicode and absurd directives.
        line, message = builder.line, "YAML syntax: an escape or a version number is out of range"
    return None, [*builder.mistakes, Mistake(Where(line, override), (), message)]


def _code(character: object) -> int:
    """Return the parser's code of a character as a number (PyYAML's stub says text)."""
    return character if isinstance(character, int) else ord(str(character)[:1] or "?")


def _syntax(problem: yaml.MarkedYAMLError) -> tuple[int, str]:
    mark = problem.problem_mark or problem.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    what = problem.problem or problem.context or "cannot be read"
    if "'\\t'" in what:
        what = "a tab is used to indent; YAML wants spaces"
    elif problem.context and problem.context_mark and problem.context_mark.line + 1 != line:
        what += f" ({problem.context} from line {problem.context_mark.line + 1})"
    return line, f"YAML syntax, column {column}: {what}"


class _Builder:
    def __init__(self, override: str) -> None:
        self.override = override
        self.mistakes: list[Mistake] = []
        self.line = 1
        self._anchors: dict[str, Node] = {}
        self._aliases = 0

    def _mistake(self, where: Where, at: Location, text: str, *, final: bool = True) -> None:
        self.mistakes.append(Mistake(where, at, text, final))

    def document(self, events: Iterator[yaml.Event]) -> Node:
        root: Node | None = None
        for event in events:
            self.line = _line(event)
            if isinstance(event, yaml.NodeEvent):
                root = self._node(event, events, ())
            elif isinstance(event, yaml.DocumentStartEvent) and root is not None:
                raise _UnreadableError(_line(event), "a second document begins here; only one is allowed")
        return root or Node(None, Where(1, self.override))

    def _node(self, event: Any, events: Iterator[yaml.Event], at: Location) -> Node:
        self.line = _line(event)
        if len(at) > MAX_DEPTH:
            raise _UnreadableError(self.line, f"is nested more than {MAX_DEPTH} levels deep")
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        where = Where(self.line, self.override)
        if event.tag not in (None, "!"):
            tag = str(event.tag).replace("tag:yaml.org,2002:", "!!")
            self._mistake(where, at, f"the tag {quoted(tag)} is not used here; drop it")
        if isinstance(event, yaml.ScalarEvent):
            node = Node(self._scalar(event, where, at), where)
        elif isinstance(event, yaml.SequenceStartEvent):
            node = Node(self._sequence(events, at), where)
        else:
            node = Node(self._mapping(events, at), where)
        if event.anchor:
            self._anchors[event.anchor] = node
        return node

    def _alias(self, event: yaml.AliasEvent) -> Node:
        self._aliases += 1
        if self._aliases > MAX_ALIASES:
            raise _UnreadableError(self.line, f"more than {MAX_ALIASES} aliases (*name) are used")
        if event.anchor not in self._anchors:
            raise _UnreadableError(self.line, f"the alias *{event.anchor} names no block that ended above it")
        return self._anchors[event.anchor]

    def _scalar(self, event: yaml.ScalarEvent, where: Where, at: Location) -> Scalar:
        text = str(event.value)
        if CONTROL.search(text):
            self._mistake(where, at, "has a control character or a lone surrogate")
            return "?"
        if event.style:
            return text
        for pattern, advice in _TRAPS:
            if pattern.fullmatch(text):
                self._mistake(where, at, f"{quoted(text)} {advice}")
                return text
        return self._plain(text, where, at)

    def _plain(self, text: str, where: Where, at: Location) -> Scalar:
        if text in _NULL:
            return None
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
        if _FLOAT.fullmatch(text):
            number = float(text)
            if len(text) > _MAX_DIGITS or number in (float("inf"), float("-inf")):
                self._mistake(where, at, f"{quoted(text)} is too long or too large a number")
                return text
            return int(text) if _INT.fullmatch(text) else number
        return text

    def _sequence(self, events: Iterator[yaml.Event], at: Location) -> list[Node]:
        items: list[Node] = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            items.append(self._node(event, events, (*at, len(items))))
        return items

    def _mapping(self, events: Iterator[yaml.Event], at: Location) -> dict[str, Node]:
        items: dict[str, Node] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            line = _line(event)
            if not isinstance(event, yaml.ScalarEvent):
                raise _UnreadableError(line, "a key must be a word, not a list, a mapping or an alias")
            key, where = str(event.value), Where(line, self.override)
            if CONTROL.search(key):
                raise _UnreadableError(line, "a key has a control character or a lone surrogate")
            value = replace(self._node(next(events), events, (*at, key)), key_where=where)
            if key in items:
                first = items[key].label_where.line
                message = f"the key {quoted(key)} is given twice, first on line {first}"
                self._mistake(where, (*at, key), message, final=False)
            else:
                items[key] = value
        return items


def one_line(value: object) -> str:
    """Return a value as YAML on one line, quoted where needed."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...").strip()


def _line(event: yaml.Event) -> int:
    mark = event.start_mark
    return int(mark.line) + 1 if mark else 1


def plain(node: Node) -> Plain:
    """Return the tree as plain data."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def locate(root: Node, location: Location, *, key: bool = False) -> Where:
    """Return the place of a value, or of its nearest parent in the text.

    With ``key``, the line of its key, or of the key of the mapping that should contain it."""
    node, found = _step_down(root, location)
    return node.label_where if key or not found else node.where


def _step_down(root: Node, location: Location) -> tuple[Node, bool]:
    """Return the node at a location or its last existing parent, and whether it is the node itself."""
    node = root
    for step in location:
        children = node.value
        child = None
        if isinstance(children, dict) and isinstance(step, str):
            child = children.get(step)
        elif isinstance(children, list) and isinstance(step, int) and step < len(children):
            child = children[step]
        if child is None:
            return node, False
        node = child
    return node, True


def exists(root: Node, location: Location) -> bool:
    """Return whether the text has a value at that location."""
    return _step_down(root, location)[1]
