"""Overrides of scenario values by their paths, from `--set` and other options."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from kvbench.core.scenario.yaml_lines import (
    CONTROL,
    MAX_DEPTH,
    Location,
    Mistake,
    Node,
    Plain,
    Where,
    quoted,
    read_yaml,
    shorten,
)

# Key that a plain word stands for, if an override sets a value below it: `model: tiny` is
# `model: {preset: tiny}`, and `- nixl` is `- {name: nixl}`.
_WORD_KEY: Final = {"model": "preset", "connectors": "name"}
# Paths at which a number stands for a mapping with `instances`.
_COUNTS: Final = (("deployment", "prefill"), ("deployment", "decode"), ("deployment", "aggregated"))


class Unread(str):
    """YAML text of a value as the user typed it, not parsed yet."""


Overrides = Mapping[str, Plain]
"""Path, such as ``slo.ttft_ms`` → value or ``Unread``; None means that no value was given (an error)."""


def typed_overrides(texts: Sequence[str]) -> Overrides:
    """Return the ``path=value`` texts of `--set`; the last value of a path counts, in its position."""
    found: Overrides = {}
    for text in texts:
        path, equals, value = text.partition("=")
        path = path.strip()
        found = merged(found, {path or text: Unread(value) if equals and path else None})
    return found


def merged(*parts: Overrides) -> Overrides:
    """Return all overrides in order; a repeated path moves to its last position, since others may lie below
    it."""
    found: dict[str, Plain] = {}
    for part in parts:
        for path, value in part.items():
            found.pop(path, None)
            found[path] = value
    return found


class _OverrideError(Exception):
    """An override whose path does not exist."""


def apply_overrides(root: Node, overrides: Overrides, typed: Mapping[str, str]) -> tuple[Node, list[Mistake]]:
    """Apply the overrides in order; return the tree and their mistakes.

    ``typed``: path → option as the user typed it, if not ``--set``."""
    mistakes: list[Mistake] = []
    for path, given in overrides.items():
        option = typed.get(path) or f"--set {path if path.isprintable() else repr(path)}"
        where = Where(0, option)
        steps = path.split(".")
        if given is None or not all(steps) or len(steps) > MAX_DEPTH:
            mistakes.append(Mistake(where, (), "is not of the form path=value, as in slo.ttft_ms=300"))
            continue
        value, found = read_yaml(given, option) if isinstance(given, Unread) else _node_of(given, option)
        if value is None:
            mistakes += found
            continue
        try:
            root, location = _put(root, steps, replace(value, key_where=where), ())
        except _OverrideError as problem:
            mistakes.append(Mistake(where, (), str(problem)))
            continue
        mistakes += [replace(mistake, location=location + mistake.location) for mistake in found]
    return root, mistakes


def _node_of(value: Plain, override: str) -> tuple[Node, list[Mistake]]:
    """Return an override's plain data as a tree, with the mistakes that YAML would have caught."""
    mistakes: list[Mistake] = []

    def node(value: Plain, at: Location) -> Node:
        where = Where(1, override)
        if isinstance(value, dict):
            return Node({key: node(child, (*at, key)) for key, child in value.items()}, where)
        if isinstance(value, list):
            return Node([node(child, (*at, index)) for index, child in enumerate(value)], where)
        if isinstance(value, str) and CONTROL.search(value):
            mistakes.append(Mistake(where, at, "has a control character or a lone surrogate"))
            return Node("?", where)
        if isinstance(value, float) and not math.isfinite(value):
            return Node(str(value), where)
        return Node(value, where)

    return node(value, ()), mistakes


def _put(node: Node, steps: Sequence[str], value: Node, at: Location) -> tuple[Node, Location]:
    """Return the node with a value set below it, and the value's full location."""
    if not steps:
        return value, at
    step, rest = steps[0], steps[1:]
    inside = node.value
    empty = Node(None, value.where, value.key_where)
    if isinstance(inside, list):
        index = _index(inside, step, at)
        changed, location = _put(inside[index], rest, value, (*at, index))
        return replace(node, value=[*inside[:index], changed, *inside[index + 1 :]]), location
    word = _WORD_KEY.get(str(at[0])) if at else None
    if isinstance(inside, int) and at in _COUNTS:
        inside = {"instances": node}
    if isinstance(inside, str) and word and len(at) == (2 if word == "name" else 1):
        inside = {word: node}
    if inside is None:
        inside = {}
    if not isinstance(inside, dict):
        raise _OverrideError(
            f"{quoted('.'.join(map(str, at)))} is {shorten(inside)}, which has nothing below it"
        )
    changed, location = _put(inside.get(step, empty), rest, value, (*at, step))
    return replace(node, value={**inside, step: changed}), location


def _index(items: list[Node], step: str, at: Location) -> int:
    """Return the index of an entry given by its number (from 0), label or name."""
    name = ".".join(map(str, at))
    if step.isascii() and step.isdigit() and len(step) < 9:
        if int(step) < len(items):
            return int(step)
        raise _OverrideError(f"{name} has no entry {step}; they are numbered from 0 to {len(items) - 1}")
    labels = [_entry_label(item) for item in items]
    if step in labels:
        return labels.index(step)
    raise _OverrideError(f"{name} has no entry {quoted(step)}; there are: {', '.join(labels) or 'none'}")


def _entry_label(item: Node) -> str:
    if not isinstance(item.value, dict):
        return str(item.value) if isinstance(item.value, (str, int, float)) else "?"
    for key in ("label", "name"):
        if key in item.value:
            return str(item.value[key].value)
    return "?"
