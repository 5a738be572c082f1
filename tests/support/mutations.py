"""Damage for fuzz tests, drawn by hypothesis: bytes cut, flipped, doubled, planted; JSON of another shape."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from hypothesis import HealthCheck, example, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

EXAMPLES: Final = int(os.environ.get("FUZZ_EXAMPLES", "0"))
"""So many examples for each fuzz test, new ones each time; 0: a few, always the same (the default suite)."""

CORPUS: Final = Path(__file__).parents[1] / "recorded" / "fuzz"
"""Inputs that once broke something, as they came: a folder a kind, a file an input."""
FOUND: Final = Path(__file__).parents[2] / ".hypothesis" / "fuzz"
"""What `make fuzz` found: it tries that first, each time, until it breaks nothing any more."""

PLANTS: Final = (
    b"\0",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\xed\xa0\x80",  # a lone surrogate
    b"\r\n",
    b"\x1b[31m",
    b"1e999",
    b"NaN",
    b"-1",
    b"9" * 5000,
    b"[" * 3000,
    b'{"a":' * 1500,
    b"../../escaped",
    b"$(touch escaped)",
    b"`touch escaped`",
    b"; touch escaped #",
    b"%s%n{0}{}",
    "💥".encode(),
    "\u202e\u2028".encode(),
    b"&a [*a, *a]",
    b"!!python/object/apply:os.system ['touch escaped']",
    b"<<: *a",
    b"'",
    b'"',
    b"{}",
    b"null",
    b"=" * 60,
)
ODD: Final[tuple[Any, ...]] = (
    None, True, -1, 0, 10**400, 2**63, 1e308, float("nan"), float("-inf"), "", "../../escaped", "\0",
    "\ud800", "💥" * 50, "x" * 10_000, [], [[]], {}, {"": {}}, [1, "2", None],
)  # fmt: skip


def fuzz(examples: int) -> Callable[[Any], Any]:
    """The settings of a fuzz test that has so many examples in the default suite."""
    return settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        deadline=None,
        database=DirectoryBasedExampleDatabase(FOUND) if EXAMPLES else None,
        suppress_health_check=list(HealthCheck),
    )


def stored(kind: str, argument: str, **others: Any) -> Callable[[Any], Any]:
    """Gives a fuzz test each stored input of that kind, as its ``argument``, before any other."""

    def add(test: Any) -> Any:
        for path in sorted((CORPUS / kind).iterdir()):
            test = example(**{argument: path.read_bytes()}, **others)(test)
        return test

    return add


@st.composite
def damaged(draw: st.DrawFn, samples: Sequence[bytes]) -> bytes:
    """One of the samples with one to four wounds."""
    data = draw(st.sampled_from(samples))
    for _ in range(draw(st.integers(1, 4))):
        data = draw(st.sampled_from(WOUNDS))(draw, data)
    return data


def _place(draw: st.DrawFn, data: bytes) -> int:
    return draw(st.integers(0, len(data)))


def _cut(draw: st.DrawFn, data: bytes) -> bytes:
    return data[: _place(draw, data)]


def _flip(draw: st.DrawFn, data: bytes) -> bytes:
    if not data:
        return data
    at = draw(st.integers(0, len(data) - 1))
    return data[:at] + bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) + data[at + 1 :]


def _plant(draw: st.DrawFn, data: bytes) -> bytes:
    at = _place(draw, data)
    return data[:at] + draw(st.sampled_from(PLANTS)) + data[at:]


def _drop(draw: st.DrawFn, data: bytes) -> bytes:
    at, end = sorted((_place(draw, data), _place(draw, data)))
    return data[:at] + data[end:]


def _double(draw: st.DrawFn, data: bytes) -> bytes:
    at, end = sorted((_place(draw, data), _place(draw, data)))
    return data[:end] + data[at:]


def _recode(draw: st.DrawFn, data: bytes) -> bytes:
    return data.decode("utf-8", "replace").encode(
        draw(st.sampled_from(["utf-16", "utf-16-be", "cp500"])), "replace"
    )


def _number(draw: st.DrawFn, data: bytes) -> bytes:
    """Another number in place of one of the text's."""
    words = data.split(b" ")
    places = [at for at, word in enumerate(words) if word.strip(b",.\n\r").isdigit()]
    if not places:
        return _plant(draw, data)
    words[draw(st.sampled_from(places))] = draw(
        st.sampled_from([b"0", b"-3", b"1e400", b"inf", b"9" * 400, b"x"])
    )
    return b" ".join(words)


def _reshape(draw: st.DrawFn, data: bytes) -> bytes:
    """An odd value in place of one of a JSON text's, or of one of its lines'."""
    lines = data.split(b"\n") if b"\n{" in data else [data]
    at = draw(st.integers(0, len(lines) - 1))
    try:
        value = json.loads(lines[at])
    except (ValueError, RecursionError):
        return _flip(draw, data)
    lines[at] = json.dumps(_with_odd(draw, value)).encode("utf-8", "surrogatepass")
    return b"\n".join(lines)


def _with_odd(draw: st.DrawFn, value: Any) -> Any:
    """The value with something else at a place in it; whatever it was is left as it is."""
    if isinstance(value, dict) and value and draw(st.integers(0, 9)):
        key = draw(st.sampled_from(sorted(value)))
        what = draw(st.sampled_from(["inside", "gone", "key"]))
        if what == "gone":
            return {name: member for name, member in value.items() if name != key}
        if what == "key":
            return {**value, draw(st.sampled_from(["", "cell", "../x", "\0"])): 1}
        return {**value, key: _with_odd(draw, value[key])}
    if isinstance(value, list) and value and draw(st.integers(0, 9)):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], _with_odd(draw, value[at]), *value[at + 1 :]]
    return draw(st.sampled_from(ODD))


WOUNDS: Final = (_cut, _flip, _plant, _drop, _double, _recode, _number, _reshape, _reshape)
