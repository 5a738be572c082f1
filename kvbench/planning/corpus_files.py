"""Reads a corpus of sessions from a file, packed with gzip or not, or from a folder of JSON files.

A file has a JSON object a line, is one JSON object or list, or is a Parquet table with a row an object. Its
format is told by the keys of its first object; formats are described in ``core/sessions``.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, get_args

from kvbench.core.load.traces import parse_trace
from kvbench.core.sessions.corpus import Corpus
from kvbench.core.sessions.corpus_formats import (
    CorpusRow,
    agentic_corpus,
    aiperf_corpus,
    lengths_corpus,
    mooncake_corpus,
    sharegpt_corpus,
)
from kvbench.errors import InputError

CorpusFormat = Literal["agentic", "mooncake", "aiperf", "sharegpt", "lengths"]
FORMATS: Final[tuple[CorpusFormat, ...]] = get_args(CorpusFormat)
AUTO: Final = "auto"

_KEYS: Final[tuple[tuple[str, CorpusFormat], ...]] = (
    ("requests", "agentic"),
    ("turns", "aiperf"),
    ("conversations", "sharegpt"),
    ("hash_ids", "mooncake"),
    ("input_length", "mooncake"),
    ("session_id", "lengths"),
)
"""A key of the first object → the format; the first that is there."""
_BATCH: Final = 1024
MOST_BYTES: Final = 2 * 2**30
"""Unpacked, of JSON. A larger corpus is refused while it is read."""


def load_corpus(path: Path, kind: str = AUTO, output_len: int | None = None) -> Corpus:
    """The sessions of a file or folder. ``output_len``: of answers whose length is not told.

    Raises InputError if it cannot be read, has another format, or no session.
    """
    if kind != AUTO and kind not in FORMATS:
        raise InputError(
            f"no format of a corpus is called {kind!r}", hint=f"there are: {', '.join((AUTO, *FORMATS))}"
        )
    rows = [CorpusRow.of(value, where) for each in _files(path) for where, value in _values(each)]
    if not rows:
        raise InputError(f"{path}: there is no session in it")
    kind = _guess(rows[0]) if kind == AUTO else kind
    if kind == "agentic":
        corpus = agentic_corpus(rows)
    elif kind == "aiperf":
        corpus = aiperf_corpus(rows, output_len)
    elif kind == "sharegpt":
        corpus = sharegpt_corpus(rows)
    elif kind == "lengths":
        corpus = lengths_corpus(rows)
    else:
        text = "".join(json.dumps(row.values) + "\n" for row in rows)
        corpus = mooncake_corpus(parse_trace(text, str(path), "mooncake"))
    if not any(session.turns for session in corpus.sessions):
        raise InputError(f"{path}: there is no request in it")
    return corpus


def _guess(first: CorpusRow) -> CorpusFormat:
    for key, kind in _KEYS:
        if key in first.values:
            return kind
    raise InputError(
        f"{first.where}: its format cannot be told from its keys: {', '.join(map(str, first.values))[:80]}",
        hint=f"give --format, one of {', '.join(FORMATS)}; docs/sessions.md says what each has",
    )


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(each for each in path.iterdir() if each.suffix == ".json")
    if not found:
        raise InputError(f"{path} is a folder without JSON files", hint="name a file, or the right folder")
    return found


def _values(path: Path) -> Iterator[tuple[str, Any]]:
    """Each value of a file, and where it stands; the members of a list, or rows of a table, one by one."""
    if path.suffix == ".parquet":
        yield from _table_rows(path)
        return
    lines = _lines(path)
    line, first = next(lines, (0, ""))
    if not line:
        return
    try:
        yield from _members(f"{path}:{line}", _parsed(first))
    except ValueError:
        # No object a line: one that spans lines, or a mistake, which is said as one of the whole text.
        text = first + "".join(rest for _, rest in lines)
        yield from _members(str(path), _checked(text, str(path)))
        return
    for line, text in lines:
        yield from _members(f"{path}:{line}", _checked(text, f"{path}:{line}"))


def _table_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Rows of a Parquet table, a batch at a time. An empty cell is a key that is not there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    try:
        with pq.ParquetFile(path) as table:
            for batch in table.iter_batches(_BATCH):
                for values in batch.to_pylist():
                    row += 1
                    known = {name: value for name, value in values.items() if value is not None}
                    yield f"{path}, row {row}", known
    except (OSError, pa.ArrowException) as error:
        raise InputError(
            f"the corpus {path} cannot be read as Parquet: {str(error).splitlines()[0]}",
            hint="its path counts from where kvbench is started",
        ) from error


def _members(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list):
        yield from ((f"{where}, [{place}]", each) for place, each in enumerate(value))
    else:
        yield where, value


def _checked(text: str, where: str) -> Any:
    try:
        return _parsed(text)
    except ValueError as error:
        raise InputError(f"{where}: is no JSON: {error}", hint="a corpus is JSON, an object a line") from None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is no number")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, by their numbers from 1."""
    read = 0
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, start=1):
                read += len(line)
                if read > MOST_BYTES:
                    raise InputError(
                        f"{path} has more than {MOST_BYTES / 2**30:g} GiB", hint="cut it to what is used"
                    )
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield number, text
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"the corpus {path} cannot be read: {reason}",
            hint="its path counts from where kvbench is started",
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no text: byte {error.start} of a line is not UTF-8") from error


def _opened(path: Path) -> Any:
    if path.exists() and not path.is_file():
        raise InputError(f"the corpus {path} is a pipe or a device, and no file")
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if packed else path.open("rb")
