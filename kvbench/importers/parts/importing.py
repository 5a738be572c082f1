"""``kvbench import``: results of other tools → a run folder that names each row's source. Serving results
become trials of method "imported" in a run of kind "imported"; transfer results become rows of a run of kind
"microbench". Both have the label "imported". ``manifest.json`` has under ``imported`` the files (name,
SHA-256, lines), the tool, missing values, left-out parts with reasons, and claims in the files."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from kvbench import importers
from kvbench.core.fitted_table import Grid, columns_of
from kvbench.core.transfers.records import TransferWarning
from kvbench.core.units import size_text
from kvbench.errors import EXIT_OK, InputError
from kvbench.files import similar_files
from kvbench.importers.base import (
    Imported,
    ImportedRow,
    LeftOut,
    Origin,
    ServingRow,
    TransferRow,
    read_lines,
    read_text,
)
from kvbench.importers.parts.trials import IMPORTED, keep_plausible, trial_of
from kvbench.report.tables.table import MISSING, number
from kvbench.results.run import load_run
from kvbench.results.store import RunInfo, RunStore


def serving_table(rows: Sequence[ServingRow]) -> Grid:
    """Return one table line per row; ≈ precedes a mean length."""
    headings = (
        "req/s\noffered",
        "done",
        "s",
        "req/s",
        "out\ntok/s",
        "TTFT ms\nmean / P50 / P99",
        "TPOT ms\nmean / P99",
        "line",
    )
    cells = [
        [
            row.connector or MISSING,
            _length(row, "input_len"),
            _length(row, "output_len"),
            _how(row),
            number(row.request_rate),
            _count(row.figures.get("completed")),
            number(row.figures.get("duration_s")),
            number(row.figures.get("request_throughput")),
            number(row.figures.get("output_throughput")),
            _several(row, "ttft", ("mean", "median", "p99")),
            _several(row, "tpot", ("mean", "p99")),
            f"{row.origin.line}",
        ]
        for row in rows
    ]
    ranks = {"line": 6, "s": 5, "done": 4, "out\ntok/s": 3, "out": 2}
    return Grid(columns_of("connector|in|out|how", "|".join(headings), ranks), cells)


def _length(row: ServingRow, name: str) -> str:
    """Return a length in tokens, with ≈ for a computed mean."""
    text = _count(getattr(row, name))
    return f"≈{text}" if name in row.derived else text


def _how(row: ServingRow) -> str:
    settings = row.settings
    words = [f"tp {settings['tp']}"] if "tp" in settings else []
    if isinstance(settings.get("nics"), int):
        words.append(f"{settings['nics']} NIC" + ("s" if settings["nics"] != 1 else ""))
    elif settings.get("protocol"):
        words.append(str(settings["protocol"]))
    return ", ".join(words) or MISSING


def _several(row: ServingRow, latency: str, statistics: Sequence[str]) -> str:
    return " / ".join(number(row.figures.get(f"{statistic}_{latency}_ms")) for statistic in statistics)


def _count(value: float | None) -> str:
    return MISSING if value is None else f"{value:g}" if value < 1e6 else f"{value:.0f}"


def transfer_table(rows: Sequence[TransferRow]) -> Grid:
    cells = [
        [
            row.record.case.backend,
            row.record.case.protocol,
            _op(row),
            MISSING if "block_bytes" in row.missing else size_text(row.record.case.block_bytes),
            MISSING if "batch_size" in row.missing else f"{row.record.case.batch_size}",
            MISSING if "threads" in row.missing else f"{row.record.case.threads}",
            number(row.record.gb_per_s),
            f"{row.origin.line}",
        ]
        for row in rows
    ]
    return Grid(columns_of("backend|protocol|op", "block|batch|at a time|GB/s|line", {"line": 1}), cells)


def _op(row: TransferRow) -> str:
    """Return the operation, and the row's qualifier: ``write, both directions together``."""
    words = [] if "op" in row.missing else [row.record.case.op]
    return ", ".join([*words, *([row.record.case.shape] if row.record.case.shape else [])]) or MISSING


_TRACES: Final = re.compile(
    r"vllm bench serve|benchmark_serving\.py|Serving Benchmark|nixlbench|transfer_engine_bench|_perf\b|"
    r"ib_\w+_bw|aiperf|guidellm|TTFT|num_prompts",
    re.IGNORECASE,
)
_SHOWN: Final = 12
_LOOKED_AT: Final = 4096
"""Maximum number of left-out lines that are printed; the manifest has all of them."""


@dataclass(frozen=True)
class ImportOptions:
    """Options of the command. ``connector``: for rows whose file names none."""

    files: Sequence[Path]
    format: str | None = None
    name: str | None = None
    connector: str | None = None


@dataclass
class ImportedFile:
    """An imported file or folder: its format and content."""

    path: Path
    format: str
    reading: Imported


def command(options: ImportOptions, output: Path, console: Console) -> int:
    """Import all files into one run folder, and print the rows. Raises InputError without any result."""
    sources = [read(path, options.format) for path in options.files]
    _distinct_names(sources)
    rows = [row for source in sources for row in source.reading.rows]
    if len({isinstance(row, ServingRow) for row in rows}) > 1:
        raise InputError(
            "these files have results of serving and of raw transfers, which need different tables",
            hint="import each kind separately",
        )
    for row in rows:
        if isinstance(row, ServingRow) and not row.connector and options.connector:
            row.connector = options.connector
            row.derived["connector"] = "given on kvbench's command line"
    folder = write(sources, options, output)
    _print(sources, rows, folder, console)
    from kvbench.report.report import print_documents

    print_documents([load_run(folder)], console)
    return EXIT_OK


def read(path: Path, name: str | None = None) -> ImportedFile:
    """Read a file in the format ``name`` or the recognised one. Raises InputError."""
    if not path.exists():
        raise InputError(
            f"there is no file {str(path)!r}",
            hint=f"{similar_files(path)}give the path of a result file, or of a folder with some",
        )
    found = name or importers.recognise_format(path)
    if found is None:
        raise InputError(f"{path.name}: {_mismatch(path)}", hint=f"formats: {', '.join(importers.names())}")
    reading = importers.get(found).read(path)
    keep_plausible(reading)
    if not reading.rows:
        texts = [problem.message() for problem in reading.problems] or [f"{path.name}: contains no result"]
        raise InputError(f"{path.name} as {found} has no complete result:  " + "; ".join(texts[:3]))
    reading.problems += _cut_off_rows(path, reading)
    return ImportedFile(path, found, reading)


def _cut_off_rows(path: Path, reading: Imported) -> list[LeftOut]:
    """Report a row on a last line without a line end: its last value may be cut off."""
    if path.is_dir() or path.suffix == ".json" or read_text(path).endswith("\n"):
        return []
    last = len(read_lines(path))
    if not any(row.origin.line == row.origin.last_line == last for row in reading.rows):
        return []
    text = "the file ends in this line without a line end: its last value may be cut off"
    return [LeftOut(last, text, path.name)]


def _mismatch(path: Path) -> str:
    """Return why a file is not recognised, with the most similar lines."""
    if path.is_dir():
        return "the folder contains no results of a known tool"
    lines = read_lines(path)
    if _binary("\n".join(lines)[:_LOOKED_AT]):
        return "this is not text; supported are text, JSON, CSV, and folders of them"
    if traces := [line for line, text in enumerate(lines, start=1) if _TRACES.search(text)]:
        places = ", ".join(str(line) for line in traces[:5]) + (", …" if len(traces) > 5 else "")
        return f"no complete result of a known tool in its {len(lines)} lines; similar text at line {places}"
    return f"no result of a known tool in its {len(lines)} lines; line 1 is {lines[0].strip()[:60]!r}"


def _binary(text: str) -> bool:
    """Whether more than a tenth of the decoded text is invalid or control characters."""
    odd = sum(char == "\ufffd" or not (char.isprintable() or char.isspace()) for char in text)
    return "\0" in text or odd > len(text) / 10


# --- the run folder --------------------------------------------------------------------------------


def write(sources: Sequence[ImportedFile], options: ImportOptions, output: Path) -> Path:
    transfers = any(source.reading.transfers for source in sources)
    about = {key: value for source in sources for key, value in source.reading.about.items()}
    name = options.name or sources[0].path.stem
    argv = ["kvbench", "import", *(shlex.quote(source.path.name) for source in sources)]
    argv += ["--format", options.format] if options.format else []
    info = RunInfo(kind="microbench" if transfers else IMPORTED, argv=argv, labels=[IMPORTED])
    environment = {"gpus": [{"name": gpu} for gpu in about["gpus"]]} if about.get("gpus") else {}
    store = RunStore.create(output, name, b"", _plan(sources, about, name), environment, info)
    with store:
        place = 0
        for source in sources:
            for row in source.reading.rows:
                place += 1
                if isinstance(row, ServingRow):
                    store.add_trial(trial_of(row, place), row.requests)
                else:
                    store.add_transfer(row.record)
        # Seed and time of the measurement are unknown; the import's would be wrong.
        store.update(seed=None, started_at="", imported=provenance(sources, about))
    return store.path


def _plan(sources: Sequence[ImportedFile], about: dict[str, Any], name: str) -> dict[str, Any]:
    rows = [row for source in sources for row in source.reading.serving]
    models = {str(row.settings.get("model") or row.settings.get("model_id") or "") for row in rows}
    model = about.get("model") or (models.pop() if len(models) == 1 else "")
    return {"name": name, "model": Path(str(model)).name, "slo": about.get("slo"), "imported": True}


def provenance(sources: Sequence[ImportedFile], about: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest's section ``imported``: see the module's docstring."""
    rows = [row for source in sources for row in source.reading.rows]
    missing = Counter(name for row in rows for name in row.missing)
    return {
        "files": [entry for source in sources for entry in _files(source)],
        "rows": len(rows),
        "missing": dict(sorted(missing.items())),
        "left_out": [
            {"file": problem.file, "line": problem.line, "why": problem.text}
            for source in sources
            for problem in source.reading.problems
        ],
        "definitions": {
            source.format: source.reading.definitions for source in sources if source.reading.definitions
        },
        "about": {key: value for key, value in about.items() if key != "claims"},
        "claims": about.get("claims", []),
    }


def _files(source: ImportedFile) -> list[dict[str, Any]]:
    inside = source.reading.files or [source.path]
    versions = sorted({row.origin.version for row in source.reading.rows} - {""})
    tools = sorted({row.origin.tool for row in source.reading.rows} - {""})
    return [
        {
            "name": path.relative_to(source.path).as_posix() if source.path.is_dir() else path.name,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "bytes": path.stat().st_size,
            "lines": len(read_lines(path)),
            "format": source.format,
            "tool": ", ".join(tools),
            "version": ", ".join(versions) or None,
        }
        for path in inside
    ]


def _distinct_names(sources: Sequence[ImportedFile]) -> None:
    """Make names of files from several folders distinct, by their folder's name, or else by a number."""
    counts = Counter(source.path.name for source in sources)
    seen: Counter[str] = Counter()
    for source in sources:
        if counts[source.path.name] == 1:
            continue
        prefix = source.path.resolve().parent.name
        seen[prefix] += 1
        prefix = prefix if seen[prefix] == 1 else f"{prefix}#{seen[prefix]}"
        source.reading.rows = [_renamed(row, f"{prefix}/{row.origin.file}") for row in source.reading.rows]
        source.reading.problems = [
            LeftOut(problem.line, problem.text, f"{prefix}/{problem.file}")
            for problem in source.reading.problems
        ]


def _renamed(row: ImportedRow, file: str) -> ImportedRow:
    origin: Origin = replace(row.origin, file=file)
    row.origin = origin
    if isinstance(row, TransferRow):
        row.record.warnings = [
            TransferWarning(warning.kind, warning.message, warning.advice, {**warning.evidence, "file": file})
            for warning in row.record.warnings
        ]
    return row


# --- printing --------------------------------------------------------------------------------------


def _print(
    sources: Sequence[ImportedFile], rows: Sequence[ImportedRow], folder: Path, console: Console
) -> None:
    for source in sources:
        what = importers.get(source.format).FORMAT
        _line(
            console, f"{source.path.name}: {len(source.reading.rows)} rows, read as {source.format} ({what})"
        )
    serving = [row for row in rows if isinstance(row, ServingRow)]
    moved = [row for row in rows if isinstance(row, TransferRow)]
    grid = serving_table(serving) if serving else transfer_table(moved)
    fitted = grid.fitted(console.width if console.is_terminal else None)
    console.print(fitted.text(), markup=False, soft_wrap=True)
    missing = Counter(name for row in rows for name in row.missing)
    if everywhere := [name for name, count in missing.items() if count == len(rows)]:
        _line(console, f"not reported in any row: {', '.join(everywhere)}", "dim")
    problems = [problem for source in sources for problem in source.reading.problems]
    for problem in problems[:_SHOWN]:
        _line(console, f"  • {problem.message()}", "yellow")
    if len(problems) > _SHOWN:
        _line(
            console, f"  • and {len(problems) - _SHOWN} more: see imported.left_out in the manifest", "yellow"
        )
    for source in sources:
        for repeat in source.reading.about.get("repeated_tables", ()):
            places = f"{repeat['line']}-{repeat['last_line']}"
            _line(
                console,
                f"lines {places} repeat the table of line {repeat['repeats_line']}, all figures equal",
                "dim",
            )
    qualified = [f"{row.origin.text()}: {text}" for row in rows for text in row.qualifiers]
    for text in qualified[:_SHOWN]:
        _line(console, f"  • {text}")
    if len(qualified) > _SHOWN:
        _line(console, f"  • and {len(qualified) - _SHOWN} more: see the report's notes on the rows")
    if claims := [claim for source in sources for claim in source.reading.about.get("claims", ())]:
        _line(
            console,
            f"{len(claims)} claims of the text are kept with the rows: imported.claims in the manifest",
        )
    _line(console, f"files: {folder} (manifest.json, {'trials.jsonl' if serving else 'transfers.parquet'})")


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)
