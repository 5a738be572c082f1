"""Read session corpora from files or folders, and report them (``kvbench corpus``).

A file has one JSON object per line, one JSON object or list, or Parquet rows; gzip is accepted. The first
object's keys decide the format; ``core/sessions`` describes formats."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from kvbench.core.load.traces import parse_trace
from kvbench.core.physics import MODELS, ModelShape
from kvbench.core.sessions.corpus import QUANTILES, CapacityRow, Corpus, CorpusFigures, Spread
from kvbench.core.sessions.corpus_formats import (
    CorpusRow,
    agentic_corpus,
    agentic_lines,
    aiperf_corpus,
    lengths_corpus,
    mooncake_corpus,
    sharegpt_corpus,
)
from kvbench.core.sessions.generator import fitted_model
from kvbench.errors import InputError
from kvbench.files import replaced, similar_files, store_errors

if TYPE_CHECKING:
    from rich.console import Console


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
"""Key of the first object → format; the first match counts."""
_BATCH: Final = 1024
MOST_BYTES: Final = 2 * 2**30
"""Largest corpus in bytes of unpacked JSON; checked while reading."""


def load_corpus(path: Path, kind: str = AUTO, output_len: int | None = None) -> Corpus:
    """Read the sessions of a file or folder. ``output_len``: of answers without a length. Raises InputError
    if unreadable, of another format, or empty."""
    if kind != AUTO and kind not in FORMATS:
        raise InputError(f"unknown corpus format {kind!r}", hint=f"there are: {', '.join((AUTO, *FORMATS))}")
    rows = [CorpusRow.of(value, where) for file in _files(path) for where, value in _values(file)]
    if not rows:
        raise InputError(f"{path}: it has no session")
    kind = _guess_format(rows[0]) if kind == AUTO else kind
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
        raise InputError(f"{path}: it has no request")
    return corpus


def _guess_format(first: CorpusRow) -> CorpusFormat:
    for key, kind in _KEYS:
        if key in first.values:
            return kind
    raise InputError(
        f"{first.where}: unknown format with the keys {', '.join(map(str, first.values))[:80]}",
        hint=f"give --format, one of {', '.join(FORMATS)}; docs/sessions.md describes each",
    )


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(entry for entry in path.iterdir() if entry.suffix == ".json")
    if not found:
        raise InputError(f"{path} is a folder without JSON files", hint="name a file, or the right folder")
    return found


def _values(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (position, value) of a file; lists and tables are split."""
    if path.suffix == ".parquet":
        yield from _table_rows(path)
        return
    lines = _lines(path)
    line, first = next(lines, (0, ""))
    if not line:
        return
    try:
        yield from _members(f"{path}:{line}", _parse_json(first))
    except ValueError:
        # Not an object per line: an object over several lines, or an error of the whole text.
        text = first + "".join(rest for _, rest in lines)
        yield from _members(str(path), _parse_or_fail(text, str(path)))
        return
    for line, text in lines:
        yield from _members(f"{path}:{line}", _parse_or_fail(text, f"{path}:{line}"))


def _table_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield rows of a Parquet table in batches; empty cells are missing keys."""
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
            hint="a relative path starts at the current folder",
        ) from error


def _members(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list):
        yield from ((f"{where}, [{index}]", item) for index, item in enumerate(value))
    else:
        yield where, value


def _parse_or_fail(text: str, where: str) -> Any:
    try:
        return _parse_json(text)
    except ValueError as error:
        raise InputError(
            f"{where}: is not JSON: {error}", hint="a corpus is JSON, one object per line"
        ) from None


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is not a number")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    read = 0
    try:
        with _open(path) as file:
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
            hint=f"{similar_files(Path(path))}a relative path starts at the current folder",
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text: byte {error.start} of a line is not UTF-8") from error


def _open(path: Path) -> Any:
    if path.exists() and not path.is_file():
        raise InputError(f"the corpus {path} is a pipe or a device, not a file")
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if packed else path.open("rb")


_LABELS: Final = {
    "turns": "turns of a session",
    "prompt_tokens": "prompt (tokens)",
    "unseen_tokens": "of these unseen (tokens)",
    "output_tokens": "answer (tokens)",
    "think_time_s": "think time (s)",
    "session_s": "session (s)",
    "session_reuse": "offered reuse (%)",
}
_HEADS: Final = ("least", "P25", "P50", "P75", "P90", "most")


@dataclass(frozen=True, eq=False)
class CorpusReport:
    """Report of a corpus. ``capacities``: rows; ``model``: of the KV cache in GB, or None."""

    source: str
    figures: CorpusFigures
    capacities: Sequence[CapacityRow]
    model: ModelShape | None

    def gb(self, tokens: int | None) -> float | None:
        """KV cache of these tokens in GB (10⁹ bytes), or None without a model or capacity."""
        if tokens is None or self.model is None:
            return None
        return tokens * self.model.kv_bytes_per_token() / 1e9

    def to_json(self) -> dict[str, Any]:
        """Return all figures: shares of 1, lengths in tokens, times in seconds."""
        corpus, together = self.figures.corpus, self.figures.together
        return {
            "source": self.source,
            "notes": list(corpus.notes),
            "sessions": len(corpus.sessions),
            "requests": len(self.figures.turns),
            "subagents": sum(session.subagent_count() for session in corpus.sessions),
            "block_tokens": corpus.block_tokens,
            "blocks": together.blocks,
            "distinct_blocks": together.distinct,
            "found_blocks": together.found(),
            "offered_reuse": together.share(),
            "spreads": {
                name: dict(zip(map(str, QUANTILES), spread, strict=True))
                for name, spread in self.figures.spreads().items()
            },
            "model": self.model.name if self.model else None,
            "capacities": [
                {
                    "tokens": row.tokens,
                    "gb": self.gb(row.tokens),
                    "alone": row.alone,
                    "together": row.together,
                }
                for row in self.capacities
            ],
        }

    def print_to(self, terminal: Console) -> None:
        """Print two tables and caveats."""
        corpus, together = self.figures.corpus, self.figures.together
        subagents = sum(session.subagent_count() for session in corpus.sessions)
        terminal.print(
            f"{self.source}: {len(corpus.sessions):,} sessions, {len(self.figures.turns):,} requests, "
            f"{subagents:,} sub-agents",
            markup=False,
        )
        terminal.print(_spread_table(self.figures.spreads()))
        if together.blocks:
            terminal.print(
                f"offered for reuse: {together.found():,} of {together.blocks:,} blocks of "
                f"{corpus.block_tokens} tokens, {100 * together.share():.1f} %",
                markup=False,
            )
            terminal.print(_capacity_table(self))
        for note in corpus.notes:
            terminal.print(f"note: {note}", markup=False)


def corpus_report(
    source: str, figures: CorpusFigures, tokens: Sequence[int], gb: Sequence[float], model: str | None
) -> CorpusReport:
    """``tokens``, ``gb``: requested capacities; default: the usual ones. Raises InputError."""
    shape = None if model is None else MODELS.get(model)
    if model is not None and shape is None:
        raise InputError(f"unknown model {model!r}", hint=f"there are: {', '.join(MODELS)}")
    if gb and shape is None:
        raise InputError(
            "how many tokens a capacity in GB holds depends on the model", hint="give --model as well"
        )
    capacities = list(tokens)
    if shape is not None:
        capacities += [int(size * 1e9 // shape.kv_bytes_per_token()) for size in gb]
    capacities = sorted(set(capacities)) or figures.usual_capacities()
    return CorpusReport(source, figures, figures.capacities(capacities), shape)


def print_report(report: CorpusReport, terminal: Console, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        report.print_to(terminal)


def _spread_table(spreads: dict[str, Spread]) -> Any:
    from rich.table import Column, Table

    table = Table(
        Column(""), *(Column(head, justify="right") for head in _HEADS), box=None, padding=(0, 2, 0, 0)
    )
    for name, spread in spreads.items():
        share = name == "session_reuse"
        table.add_row(
            _LABELS[name], *(f"{100 * x:.1f}" if share else f"{x:,.10g}" for x in map(_short, spread))
        )
    return table


def _short(value: float) -> float:
    return round(value, 4) if abs(value) < 10 else round(value, 1) if abs(value) < 1000 else round(value)


def _capacity_table(report: CorpusReport) -> Any:
    from rich.table import Column, Table

    gb = [f"GB of {report.model.name}"] if report.model else []
    titles = ("cache (tokens)", *gb, "one a session (%)", "one for all (%)")
    table = Table(*(Column(title, justify="right") for title in titles), box=None, padding=(0, 2, 0, 0))
    for row in report.capacities:
        size = report.gb(row.tokens)
        cells = [] if report.model is None else ["–" if size is None else f"{size:,.1f}"]
        tokens = "unlimited" if row.tokens is None else f"{row.tokens:,}"
        table.add_row(tokens, *cells, f"{100 * row.alone:.1f}", f"{100 * row.together:.1f}")
    return table


MOST_BLOCKS: Final = 50_000_000
"""Maximum number of blocks over all prompts: 400 MB of ids."""


def made_after(
    corpus: Corpus, source: str, sessions: int, seed: int, write: Path | None
) -> tuple[Corpus, str]:
    """Generate sessions like a corpus, write them if requested; also return a name."""
    made = generated_corpus(corpus, sessions, seed)
    if write is not None:
        write_corpus(write, made)
    return made, f"{sessions} sessions generated like {source} (seed {seed})"


def generated_corpus(corpus: Corpus, sessions: int, seed: int) -> Corpus:
    """Generate sessions like a corpus. Raises InputError if they exceed memory limits."""
    model = fitted_model(corpus)
    held = sum(len(turn.blocks) for session in corpus.sessions for turn in session.turns) / model.sessions
    if sessions * held > MOST_BLOCKS:
        raise InputError(
            f"the prompts of {sessions:,} sessions have about {sessions * held:,.0f} blocks; "
            f"the limit is {MOST_BLOCKS:,}",
            hint=f"request {max(1, int(MOST_BLOCKS / held)):,} sessions or fewer",
        )
    plan = model.generate(sessions, seed)
    left = sum(session.subagent_count() for session in corpus.sessions)
    notes = (
        "sessions with equally long tools and system prompts are assumed to share them",
        "servers are assumed to respond at once: a session lasts its think times",
        *([f"the {left} sub-agents of the recorded sessions are not generated"] if left else []),
    )
    made = plan.corpus()
    return Corpus(made.sessions, made.block_tokens, made.scope, notes)


def write_corpus(path: Path, corpus: Corpus) -> None:
    """Write a gzipped agentic trace, deterministically. Raises InputError."""
    if not path.parent.is_dir():
        raise InputError(f"the folder {path.parent} does not exist", hint="create it first")
    with store_errors(path), replaced(path) as temporary, temporary.open("wb") as file:
        packed = gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0, compresslevel=6)
        with packed, io.TextIOWrapper(packed, encoding="ascii") as text:
            for line in agentic_lines(corpus):
                text.write(json.dumps(line, separators=(",", ":")) + "\n")
