"""``kvbench report``: run folders → the terminal, report.md, report.html, tables/, figures/.

Everything here is derived from the raw files of a run folder: delete it, report again, and it is back,
byte for byte."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from rich.console import Console

from kvbench.core.foreign_text import fenced, markdown_words, visible
from kvbench.core.transfers.records import pairs_of
from kvbench.errors import StoreError
from kvbench.files import store_errors, write_bytes, write_json
from kvbench.report.sections.build import build
from kvbench.report.sections.facts import Facts, Material, files
from kvbench.report.side_by_side import Changes, are_microbenchmarks, changes_as_text, earlier_of
from kvbench.report.tables.table import Table, json_text, markdown_table, write_csv
from kvbench.report.terminal import LiveBar, print_changed_files, print_sections
from kvbench.report.value import PICTURES_AS, Block, Note, Report, Writer, advised_once
from kvbench.results.provenance import capitalized, check_comparable
from kvbench.results.run import RunFolder, load_run


def report_markdown(report: Report, figures: Mapping[str, str] | None = None) -> str:
    """Return the report of one run as one page. ``figures``: files under figures/ by picture's name."""
    figures = figures or {}
    parts = [f"# {_escaped(report.titles['markdown'])}"]
    parts += [f"{markdown_words(report.caption)}\n\n{markdown_words(report.goal)}"]
    if report.mark is not None:
        parts.append(f"> **{capitalized(report.mark.word)}**: {_escaped(report.not_of_a_gpu)}")
    for section in report.shown("markdown", figures):
        parts += [f"## {_escaped(section.title)}"] if section.title else []
        parts += [part for block in section.blocks for part in _parts(block, figures)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _parts(block: Block, figures: Mapping[str, str]) -> Iterator[str]:
    if block.title:
        yield f"### {_escaped(block.title)}"
    yield markdown_words(block.about)
    yield bullets(block.notes)
    if block.table is not None:
        yield from _tables(block.table)
    if block.code:
        yield fenced(block.code)
    if block.picture is not None:
        yield f"![{_escaped(block.picture.title)}](figures/{figures[block.picture.name]})"


def _tables(table: Table) -> Iterator[str]:
    """Yield a table per group; footnotes have their own column."""
    header = [*table.header, *(["notes"] if table.marks else [])]
    rule = ["--:" if column.align == "right" else "---" for column in table.columns]
    rule += ["---"] if table.marks else []
    if not table.groups and not table.ruled:
        yield f"**{_escaped(table.title)}**"
    for title, rows, marks in table.parts():
        if title:
            yield f"**{_escaped(title)}**"
        noted = [[", ".join(map(str, mark))] for mark in marks] if marks else [[] for _ in rows]
        cells = [[*row, *more] for row, more in zip(rows, noted, strict=True)]
        yield markdown_table(header, cells, rule)


def _escaped(text: str) -> str:
    return markdown_words(text).replace("|", "\\|").replace("\n", " ")


def bullets(notes: Iterable[Note]) -> str:
    """Return a Markdown list; further lines of a note are quoted below it."""
    lines = []
    for note in advised_once(notes):
        first, *more = note.text.strip().splitlines() or [""]
        advice = f" → {markdown_words(' '.join(note.advice.split()))}" if note.advice else ""
        lines.append(f"- {markdown_words(' '.join(first.split()))}{advice}")
        quoted = (" ".join(visible(line).split()).replace("`", "'") for line in more)
        lines += [f"  - `{line}`" for line in quoted if line]  # lines of a log
    return "\n".join(lines)


FORMATS: Final = ("md", "html", "csv", "json", "svg")
"""Formats of a report by default. "png" adds pictures, which doubles the time."""


def command(
    paths: Sequence[Path],
    console: Console,
    *,
    force: bool = False,
    dark: bool = False,
    png: bool = False,
    as_json: bool = False,
    brief: bool = False,
) -> None:
    """Write the report of each run and print one table of all of them.

    ``dark``: figures for a dark background, too; ``png``: figures as PNG and SVG; ``as_json``: print their
    tables/*.json instead, one document per run; ``brief``: print only the result of searches.

    Raises InputError for runs that are not comparable, unless ``force``."""
    skip_property_lists()
    runs = [load_run(path) for path in paths]
    print_changed_files(runs, None if as_json else console)
    micro = are_microbenchmarks(runs, hint="report them one by one")
    differing = [] if micro else check_comparable(runs, force=force)
    formats = (*FORMATS, "png") if png else FORMATS
    with LiveBar(console) as bar:
        for index, run in enumerate(runs):
            bar.say(what=f"writing the report of {run.path.name}", share=index / len(runs))
            write_report(run, formats)
            if dark:
                from kvbench.report.plots import write_plots

                drawn = [kind for kind in PICTURES_AS if kind in formats]
                write_plots(run, run.path / "figures", drawn, "dark")
    if as_json:
        console.file.write(_documents(runs))
    elif micro:
        print_transfers(runs, console)
    else:
        searched = all(run.manifest.get("kind") not in ("chaos", "soak") for run in runs)
        render_terminal(runs, console, differing, writer="screen" if brief and searched else "terminal")


def skip_property_lists() -> None:
    """Let matplotlib's docstrings do without the lists of properties that it builds when it is imported,
    a third of the import, and its projections without the third dimension. Only for a command, which has no
    use for ``help``."""
    import matplotlib.artist

    artist: Any = matplotlib.artist
    artist.kwdoc = lambda _: ""
    artist.Artist._update_set_signature_and_docstring = classmethod(lambda _: None)
    flat: Any = ModuleType("mpl_toolkits.mplot3d")
    flat.Axes3D = None
    sys.modules.setdefault(flat.__name__, flat)


def render_terminal(
    runs: RunFolder | Sequence[RunFolder],
    console: Console,
    differing: Sequence[str] = (),
    before: RunFolder | None = None,
    writer: Writer = "terminal",
) -> None:
    """Print the report of one or several runs, with the paths of its files.

    ``differing``: why the runs are not comparable, if shown together nevertheless; ``before``: the run that a
    microbenchmark is compared with."""
    changes = Changes.between(before, runs) if before is not None and isinstance(runs, RunFolder) else None
    print_sections(build(runs, differing, changes, (writer,)).of(writer), console)
    print_documents([runs] if isinstance(runs, RunFolder) else runs, console)


def report_load(path: Path, console: Console) -> None:
    """Print the result of one load at once, while another process draws and writes the report.

    So the caller needs neither matplotlib nor pandas. Raises StoreError if the report was not written."""
    words = "import sys; from kvbench.report import report; report.skip_property_lists(); "
    argv = [sys.executable, "-c", f"{words}report.write_report(sys.argv[1])", str(path)]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as writer:
        run = load_run(path)
        print_changed_files([run], console)
        shown = build(run, writers=("terminal",)).of("terminal")
        print_sections([section for section in shown if section.anchor != "files"], console)
        _, errors = writer.communicate()
    if writer.returncode:
        last = errors.strip().splitlines()[-1:] or [f"exit code {writer.returncode}"]
        raise StoreError(
            f"the report of {path} was not written: {last[0]}", hint=f"kvbench report {path} rewrites it"
        )
    print_sections(files(Material([Facts(run)])), console)
    print_documents([run], console)


def print_documents(runs: Sequence[RunFolder], console: Console) -> None:
    """Print the documents of ``report --json`` to stdout (messages go to stderr then)."""
    if console.stderr:
        sys.stdout.write(_documents(runs))


def _documents(runs: Sequence[RunFolder]) -> str:
    return json_text({"runs": [document for run in runs for document in build(run).documents.values()]})


def print_transfers(runs: Sequence[RunFolder], console: Console) -> None:
    """Print the report of each microbenchmark; of several, each compared with the first."""
    for index, run in enumerate(runs):
        render_terminal(run, console, before=runs[0] if index else None)


def write_report(of: Path | str | RunFolder, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write the derived files of a run folder; return them."""
    from kvbench.report.html import report_html
    from kvbench.report.plots import write_plots

    run = of if isinstance(of, RunFolder) else load_run(of)
    _refuse_links(run.path)
    tables, figures = run.path / "tables", run.path / "figures"
    drawn = [kind for kind in PICTURES_AS if kind in formats]
    if len(pairs_of(run.transfer_records())) > 1:
        drawn = []  # pictures show one pair of hosts; the matrix shows several
    with store_errors(run.path):
        written = write_plots(run, figures, drawn) if drawn else []
        tables.mkdir(exist_ok=True)
        report = build(run)
        for name, rows in report.files.items() if "csv" in formats else ():
            write_csv(tables / f"{name}.csv", rows)
            written.append(tables / f"{name}.csv")
        for name, document in report.documents.items() if "json" in formats else ():
            write_json(tables / f"{name}.json", document)
            written.append(tables / f"{name}.json")
        texts = _comparison(run, formats)
        if "md" in formats:
            there = {file.stem: file.name for kind in PICTURES_AS for file in figures.glob(f"*.{kind}")}
            texts["report.md"] = report_markdown(report, there)
        if "html" in formats:
            texts["report.html"] = report_html(report, figures if "svg" in formats else None)
        for file, text in texts.items():
            write_bytes(run.path / file, visible(text).encode("utf-8", "replace"))
    return [*written, *(run.path / file for file in texts)]


def _comparison(run: RunFolder, formats: Sequence[str]) -> dict[str, str]:
    """Return the files of a microbenchmark's comparison with another one, and their texts."""
    before = earlier_of(run)
    kinds = [kind for kind in ("csv", "json", "md") if kind in formats and before is not None]
    return {
        f"tables/comparison.{kind}": changes_as_text([before, run], kind)
        for kind in kinds
        if before is not None
    }


def _refuse_links(path: Path) -> None:
    """Raise StoreError if derived files would be written outside of the folder."""
    for name in ("tables", "figures"):
        if (path / name).is_symlink():
            raise StoreError(
                f"{path / name} is a link, and nothing is written out of a run folder", hint="remove the link"
            )
