"""``kvbench watch``: a run folder as it grows, in the terminal or as a live page on this machine.

It only reads the folder, so it can be started and stopped at any time, and several may watch; it ends with
the run. The live page (``--serve``) is three addresses on the loopback device, read-only: ``/``,
``/state.json``, ``/watch.js``. It reads only the request line and serves only the host names of loopback, so
that another website in the same browser cannot read it through its own host name (DNS rebinding)."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from kvbench.core.fitted_table import FittedColumn, Grid
from kvbench.errors import EXIT_FAILED, EXIT_OK, KvbenchError, LaunchError
from kvbench.report.tables.table import number, percent
from kvbench.report.watch_state import RunWatch, Seen, TrialLine

HOST: Final = "127.0.0.1"
TEMPLATES: Final = Path(__file__).parent / "templates"
REQUEST_S: Final = 5.0
"""Idle connections are closed after this many seconds."""
_PAGES: Final = {
    "/": ("watch.html", "text/html; charset=utf-8"),
    "/watch.js": ("watch.js", "text/javascript; charset=utf-8"),
}
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'"


@contextmanager
def serving(watch: RunWatch, port: int = 0) -> Iterator[str]:
    """Serve the live page of a watched run folder in a thread; yield its address. Port 0: any free port.

    Raises LaunchError if the port is taken."""
    try:
        server = ThreadingHTTPServer((HOST, port), _handler(watch))
    except OSError as error:
        raise LaunchError(
            f"the live page cannot listen on {HOST}:{port}: {error.strerror}", hint="choose another --port"
        ) from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="watch page", daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=REQUEST_S)


def _handler(watch: RunWatch) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_S
        server_version = "kvbench"
        sys_version = ""

        def do_GET(self) -> None:
            if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
                self._answer(HTTPStatus.FORBIDDEN, b"only for this machine\n", "text/plain")
            elif self.path == "/state.json":
                self._state()
            elif self.path in _PAGES:
                name, kind = _PAGES[self.path]
                self._answer(HTTPStatus.OK, (TEMPLATES / name).read_bytes(), kind)
            else:
                self._answer(HTTPStatus.NOT_FOUND, b"not here\n", "text/plain")

        def _state(self) -> None:
            try:
                status, data = HTTPStatus.OK, watch.look().to_json()
            except KvbenchError as error:
                status, data = HTTPStatus.SERVICE_UNAVAILABLE, {"error": error.message}
            text = json.dumps(data, ensure_ascii=True, allow_nan=False, default=str)
            self._answer(status, text.encode(), "application/json")

        def _answer(self, status: HTTPStatus, content: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Content-Security-Policy", _POLICY)
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass  # the terminal shows the watched run, not the server's log

    return Handler


LOOK_S: Final = 0.5
"""Interval of the checks for changed files, in seconds; only changed folders are read."""
LINGER_S: Final = 2.5
"""Seconds for which the live page stays after the run's end, so that an open page shows the result."""
LOG_LINES: Final = 12
CURVE_BAR: Final = 20
_COLOURS: Final = {
    "met": "green",
    "missed": "red",
    "invalid": "yellow",
    "undecided": "cyan",
    "measured": "green",
}


def command(path: Path, console: Console, *, serve: bool = False, port: int = 0) -> int:
    """Watch until the run ends; return 0 if it ended well, else 1.

    Raises StoreError for a folder that is no run, LaunchError if the page's port is taken."""
    watch = RunWatch(path)
    watch.look()
    if serve:
        with serving(watch, port) as url:
            console.print(f"live page of {path}: {url} (this machine only; Ctrl-C ends it)", markup=False)
            code = _follow(watch, console)
            time.sleep(LINGER_S)
            return code
    return _follow(watch, console)


def _follow(watch: RunWatch, console: Console) -> int:
    seen = watch.look()
    if console.is_terminal:
        with Live(_screen(seen), console=console, auto_refresh=False) as live:
            while seen.running:
                time.sleep(LOOK_S)
                seen = watch.look()
                live.update(_screen(seen), refresh=True)
            live.update(_screen(seen), refresh=True)
    else:
        printed = 0
        while True:
            for line in seen.log[printed:]:
                text = _log_line(line).append(f" {line.reason}", "dim")
                console.print(text, soft_wrap=True)
            printed = len(seen.log)
            if not seen.running:
                break
            time.sleep(LOOK_S)
            seen = watch.look()
    console.print(f"the run is {seen.status}{f': {seen.error}' if seen.error else ''}", markup=False)
    return EXIT_OK if seen.status == "complete" else EXIT_FAILED


# --- display ---------------------------------------------------------------------------------------


def _screen(seen: Seen) -> RenderableType:
    parts: list[RenderableType] = [
        Text(seen.title, style="bold"),
        Text(seen.caption, style="dim"),
        _Now(seen),
    ]
    if seen.curve:
        parts.append(Panel(_Curve(seen.curve), title=Text(f"curve of {seen.cell}"), title_align="left"))
    if seen.load:
        parts.append(_pairs("last trial", seen.load))
    if seen.nics:
        parts.append(_pairs("NICs, MB/s sent / received", seen.nics))
    parts.append(Panel(_Log(seen.log[-LOG_LINES:]), title="verdicts", title_align="left"))
    return Group(*parts)


@dataclass(frozen=True)
class _Now:
    """Live line of the process that measures."""

    seen: Seen

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.seen.live.text(options.max_width, self.seen.elapsed)


@dataclass(frozen=True)
class _Curve:
    """The trials of the cell that is being searched, by rate, with a bar for the share within the SLO."""

    lines: Sequence[TrialLine]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = sorted(self.lines, key=lambda line: line.request_rate)
        columns = [
            FittedColumn("req/s"),
            FittedColumn("within SLO %"),
            FittedColumn("", "left", rank=3),
            FittedColumn("TTFT P50", rank=2),
            FittedColumn("TTFT P99", rank=1),
            FittedColumn("TPOT P50", rank=2),
            FittedColumn("verdict", "left"),
        ]
        cells = [
            [
                number(line.request_rate),
                percent(line.slo_attainment),
                "━" * round(CURVE_BAR * (line.slo_attainment or 0.0)),
                number(line.ttft_ms_p50),
                number(line.ttft_ms_p99),
                number(line.tpot_ms_p50),
                line.verdict,
            ]
            for line in lines
        ]
        for line in Grid(columns, cells).fitted(options.max_width).lines:
            colour = _COLOURS.get(lines[line.row].verdict, "") if line.row >= 0 else "bold"
            yield Text(line.text, style="" if line.kind == "rule" else colour)


@dataclass(frozen=True)
class _Log:
    """The latest verdicts, one per line, each with its reason if that fits."""

    lines: Sequence[TrialLine]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines:
            text = _log_line(line)
            reason = Text(f" {' '.join(line.reason.split())}", "dim")
            yield text.append_text(reason) if text.cell_len + reason.cell_len <= options.max_width else text


def _pairs(title: str, pairs: Sequence[tuple[str, str]]) -> RenderableType:
    """Return names and values in one line, for the queues or the NICs."""
    text = Text(f"{title}: ", style="dim")
    for index, (name, value) in enumerate(pairs):
        text.append(" · " if index else "", style="dim")
        text.append(f"{name} ", style="dim")
        text.append(value)
    return text


def _log_line(line: TrialLine) -> Text:
    """Return the line without its reason."""
    return Text.assemble(
        (f"{line.at:>7}  ", "dim"),
        f"{line.connector:<11} {line.where:>10} {line.speed:>12}  ",
        f"{percent(line.slo_attainment):>5} %  " if line.slo_attainment is not None else "         ",
        (f"{line.verdict:<9}", _COLOURS.get(line.verdict, "")),
    )
