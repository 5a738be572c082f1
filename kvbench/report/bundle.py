"""``kvbench bundle``: a run folder packed for sharing, without names of machines and users.

Text, JSON and Parquet are scrubbed (``report.scrub``). Report, tables and pictures are built from the
scrubbed files, because a picture has the host's name in its pixels. Other files are left out."""

from __future__ import annotations

import getpass
import gzip
import json
import os
import shutil
import socket
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from kvbench.core.metrics.metrics import Summary
from kvbench.core.records import Cell, Finding, RequestRecord, TrialRecord
from kvbench.errors import StoreError
from kvbench.files import bytes_of, read_object, scratch, store_errors, write_bytes, write_json
from kvbench.report.report import write_report
from kvbench.report.scrub import KINDS, Scrubber
from kvbench.results.checksums import CHECKSUMS, begin_checksums, digests
from kvbench.results.run import MANIFEST, CellResult, load_run
from kvbench.results.store import RunInfo

DERIVED: Final = ("report.md", "report.html", "tables", "figures", CHECKSUMS)
MOST_TEXT: Final = 256 * 2**20
"""Largest text file that is packed, in bytes."""
_RECORDS: Final = (TrialRecord, Cell, Finding, CellResult, RunInfo, RequestRecord, Summary)
_MANIFEST: Final = ("schema", "run_id", "status", "kvbench", "scenario", "started_at", "ended_at", "skipped")
_FIELDS: Final = frozenset([*(field.name for kind in _RECORDS for field in fields(kind)), *_MANIFEST, "cpu"])
"""Field names of run folders: they are never replaced, even if a host has the same name."""


@dataclass(frozen=True)
class BundleOptions:
    """``output``: the archive, or None for one in the current folder. ``also``: further words to remove.

    ``label``: marks a run that was changed and gets no checksums."""

    output: Path | None = None
    also: tuple[str, ...] = ()
    without_logs: bool = False
    label: str = ""


@dataclass
class Bundled:
    """Result of packing. ``left_out``: file → why; ``removed``: kind → value → its replacement."""

    archive: Path
    files: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    removed: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)


def command(path: Path, options: BundleOptions, console: Console) -> None:
    """Pack a run and print what was removed. Raises StoreError if ``path`` is no run folder or the archive
    cannot be written."""
    bundled = bundle(path, options)
    for kind, words in KINDS.items():
        values = bundled.removed[kind]
        if values:
            _line(console, f"{words}: {len(values)}, in {bundled.counts[kind]} places", "bold")
            shown = [
                f"{value if kind != 'KEY' else _hidden(value)} → {word}" for value, word in values.items()
            ]
            for line in [*shown[:10], *([f"and {len(shown) - 10} more"] if len(shown) > 10 else [])]:
                _line(console, f"  • {line}")
    if not any(bundled.removed.values()):
        _line(console, "nothing had to be removed")
    for name, why in bundled.left_out.items():
        _line(console, f"left out: {name}: {why}", "yellow")
    _line(console, f"{bundled.archive}: {len(bundled.files)} files; look through it before you share it")


def bundle(path: Path, options: BundleOptions | None = None) -> Bundled:
    """Pack the run folder ``path`` into a .tar.gz. Raises StoreError."""
    options = options or BundleOptions()
    run = load_run(path)
    scrubber = Scrubber(_hosts(run.environment, run.manifest), _users(), options.also)
    sources = list(_sources(path))
    for file in sources:
        _look(file, scrubber)
    name = scrubber.text(path.resolve().name)
    archive = options.output or Path(f"{name}-bundle.tar.gz")
    if archive.is_dir() or not archive.resolve().parent.is_dir():
        raise StoreError(
            f"{archive} cannot be written: it is a folder, or its folder does not exist",
            hint="give the archive's file name with --output",
        )
    bundled = Bundled(archive, removed=scrubber.removed, counts=scrubber.counts)
    with scratch("kvbench-bundle-") as temporary, store_errors(archive):
        folder = temporary / name
        for file in sources:
            inside = file.relative_to(path)
            if options.without_logs and inside.parts[0] == "logs":
                bundled.left_out[str(inside)] = "logs are not wanted"
                continue
            target = folder / scrubber.text(inside.as_posix())
            why = _copy(file, target, scrubber)
            if why:
                bundled.left_out[str(inside)] = why
        for empty in ("requests", "telemetry", "logs"):
            (folder / empty).mkdir(exist_ok=True)
        _sign(folder, options.label)
        write_report(folder)
        _pack(folder, archive)
        bundled.files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    return bundled


def _sign(folder: Path, label: str) -> None:
    """Write checksums of the scrubbed files if the run had any."""
    manifest = read_object(folder / MANIFEST, [])
    if manifest.pop("asked_digests", None) and not label:
        plan = read_object(folder / "plan.json", [])
        manifest["asked_digests"] = digests(bytes_of(folder / "scenario.yaml"), plan)
    if label:
        manifest.pop("checksums", None)
        manifest["labels"] = [*manifest.get("labels", []), label]
    manifest["bundled"] = True
    write_json(folder / MANIFEST, manifest)
    if manifest.get("checksums"):
        begin_checksums(folder, "bundle")


def _hosts(environment: Mapping[str, Any], manifest: Mapping[str, Any]) -> Iterable[str]:
    """Return the names of the run's machines and of this machine."""
    names = [environment.get("hostname"), environment.get("host"), *(manifest.get("hosts") or ())]
    return [str(name) for name in (*names, socket.gethostname()) if name]


def _users() -> Iterable[str]:
    try:
        return [getpass.getuser(), os.path.basename(os.path.expanduser("~"))]
    except (OSError, KeyError):
        return []


def _sources(path: Path) -> Iterator[Path]:
    """Yield the raw files of a run folder in order, without hidden, derived and external ones."""
    for file in sorted(path.rglob("*")):
        inside = file.relative_to(path)
        hidden = any(part.startswith(".") for part in inside.parts)
        if file.is_file() and not hidden and inside.parts[0] not in DERIVED:
            yield file


def _look(file: Path, scrubber: Scrubber) -> None:
    text = _text(file)
    if text is not None:
        scrubber.look(text.replace("\\/", "/"))
    elif file.suffix == ".parquet":
        for value in _parquet_texts(file):
            scrubber.look(value)


def _text(file: Path) -> str | None:
    """Return a file's text, or None if it is no text or too long."""
    if file.is_symlink() or file.stat().st_size > MOST_TEXT:
        return None
    data = file.read_bytes()
    if file.suffix == ".parquet" or b"\0" in data:
        return None
    return data.decode("utf-8", "replace")


def _copy(file: Path, target: Path, scrubber: Scrubber) -> str:
    """Write the scrubbed file; return why not, or ""."""
    if file.is_symlink():
        return "a link; what it points to is not part of the run"
    text = _text(file)
    if text is None and file.suffix != ".parquet":
        return "neither text nor Parquet, so it cannot be looked through"
    target.parent.mkdir(parents=True, exist_ok=True)
    if text is None:
        return _copy_parquet(file, target, scrubber)
    write_bytes(target, _scrubbed(file, text, scrubber).encode())
    return ""


def _scrubbed(file: Path, text: str, scrubber: Scrubber) -> str:
    if file.suffix == ".json":
        return _json(text, scrubber, indent=2)
    if file.suffix == ".jsonl":
        return "\n".join(_json(line, scrubber) if line.strip() else line for line in text.split("\n"))
    return scrubber.text(text)


def _json(text: str, scrubber: Scrubber, indent: int | None = None) -> str:
    """Scrub JSON by its decoded values, so that no escape hides a name; invalid JSON is scrubbed as text."""
    try:
        data = json.loads(text)
        libraries = data.pop("libraries", None) if isinstance(data, dict) else None
        clean = scrubber.value(data, left=_FIELDS)
    except (ValueError, RecursionError):
        return scrubber.text(text)
    if libraries is not None:
        clean["libraries"] = libraries  # names and versions; 12.8.4.1 is no address
    return json.dumps(clean, indent=indent, ensure_ascii=False) + ("\n" if indent else "")


# --- Parquet ---------------------------------------------------------------------------------------


def _parquet_texts(file: Path) -> Iterator[str]:
    """Yield the distinct texts of a Parquet file: string columns and metadata."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        opened = pq.ParquetFile(file)
        for value in (opened.schema_arrow.metadata or {}).values():
            yield value.decode("utf-8", "replace")
        for entry in opened.schema_arrow:
            kind = entry.type.value_type if pa.types.is_list(entry.type) else entry.type
            if pa.types.is_string(kind) or pa.types.is_large_string(kind):
                column = pq.read_table(file, columns=[entry.name]).column(0)
                flat = pc.list_flatten(column) if pa.types.is_list(entry.type) else column
                yield from (value for value in pc.unique(flat).to_pylist() if value)
    except (OSError, pa.ArrowException):
        return


def _copy_parquet(file: Path, target: Path, scrubber: Scrubber) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(file)
    except (OSError, pa.ArrowException) as error:
        return f"cannot be read: {error}"
    for index, entry in enumerate(table.schema):
        if _plain_numbers(entry.type):
            continue
        values = table.column(index).to_pylist()
        known: dict[str, str] = {}
        clean = [
            known.setdefault(value, scrubber.text(value)) if isinstance(value, str) and value not in known
            else known[value] if isinstance(value, str)
            else scrubber.value(value, left=_FIELDS)
            for value in values
        ]  # fmt: skip
        table = table.set_column(index, entry.name, pa.array(clean, entry.type))
    metadata = {
        scrubber.text(key.decode("utf-8", "replace")): scrubber.text(value.decode("utf-8", "replace"))
        for key, value in (table.schema.metadata or {}).items()
        if key != b"ARROW:schema"
    }
    pq.write_table(table.replace_schema_metadata(metadata or None), target, compression="zstd")
    return ""


def _plain_numbers(kind: Any) -> bool:
    import pyarrow as pa

    inner = kind.value_type if pa.types.is_list(kind) else kind
    return bool(pa.types.is_primitive(inner) or pa.types.is_boolean(inner))


# --- the archive -----------------------------------------------------------------------------------


def _pack(folder: Path, archive: Path) -> None:
    """Write a .tar.gz without user, host and time."""

    def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mtime = 0
        return entry

    with tempfile.NamedTemporaryFile(dir=archive.resolve().parent, prefix=".bundle-", delete=False) as raw:
        try:
            with (
                gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as packed,
                tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as tar,
            ):
                tar.add(folder, folder.name, filter=anonymous)
            raw.flush()
            os.fsync(raw.fileno())
            shutil.move(raw.name, archive)
        except BaseException:
            Path(raw.name).unlink(missing_ok=True)
            raise


def _hidden(value: str) -> str:
    """Return the part of a key that identifies it to its owner."""
    return f"{value[:3]}…" if len(value) > 8 else "…"


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)
