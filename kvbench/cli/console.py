"""Output and exit of a command: exit codes and readable errors. Characters outside a locale's encoding are
replaced."""

from __future__ import annotations

import codecs
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from io import TextIOWrapper
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import typer

from kvbench.core.foreign_text import visible
from kvbench.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, KvbenchError

if TYPE_CHECKING:
    from rich.console import Console


TRACEBACK_ENV = "KVBENCH_TRACEBACK"
_UNFORESEEN = (
    "unexpected error: an input file may be damaged or edited, or this is a bug in "
    f"kvbench; {TRACEBACK_ENV}=1 shows where it happened"
)


def console(*, as_json: bool = False) -> Console:
    """Return the console; pipes and files get unfolded lines. ``as_json``: readable text goes to stderr, as a
    program reads stdout."""
    from kvbench.cli.visible_console import VisibleConsole

    terminal = VisibleConsole(highlight=False, stderr=as_json)
    if terminal.is_terminal:
        return terminal
    return VisibleConsole(highlight=False, stderr=as_json, width=160, soft_wrap=True)


def with_exit_code(function: Callable[..., int | None]) -> Callable[..., None]:
    """Wrap a command for typer: its return value is the exit code (None: 0); errors are printed and give
    their own exit code."""

    @functools.wraps(function)
    def run(**options: Any) -> None:
        with _errors_in_words():
            raise typer.Exit(function(**options) or EXIT_OK)

    return run


def import_numpy() -> None:
    """Import numpy with one BLAS thread, and leave out httpx's own command: 50 ms of CPU time each. The
    matrices of kvbench are small. Child processes do not inherit the limit."""
    sys.modules.setdefault("httpx._main", ModuleType("httpx._main"))
    if "OPENBLAS_NUM_THREADS" not in os.environ:
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
        try:
            import_module("numpy")
        finally:
            del os.environ["OPENBLAS_NUM_THREADS"]


@contextmanager
def _errors_in_words() -> Iterator[None]:
    """Convert errors to a message, hint and exit code; SIGTERM acts like Ctrl-C, and SIGHUP, too, except
    under nohup."""
    wanted = (signal.SIGTERM, signal.SIGHUP)
    taken = [number for number in wanted if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, _interrupt) for number in taken}
    try:
        yield
    except KvbenchError as error:
        typer.echo(f"kvbench: {visible(error.message)}", err=True)
        if error.hint:
            typer.echo(f"hint: {visible(error.hint)}", err=True)
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt:
        typer.echo("kvbench: interrupted", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:
        if os.environ.get(TRACEBACK_ENV):
            raise
        typer.echo(f"kvbench: {type(error).__name__}: {visible(str(error))}", err=True)
        typer.echo(f"hint: {_UNFORESEEN}", err=True)
        raise typer.Exit(EXIT_FAILED) from error
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


PLAIN: Final = {
    "≤": "<=", "≥": ">=", "·": "-", "×": "x", "→": "->", "←": "<-", "–": "-", "—": "-", "…": "...", "•": "*",
    "±": "+-", "µ": "u", "─": "-", "│": "|", "⁹": "^9", "⁻": "-", "³": "^3", "²": "^2", "“": '"', "”": '"',
    "’": "'", "‘": "'", "▶": ">", "━": "=", "✓": "ok",
}  # fmt: skip
NAME: Final = "kvbench-plain"


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    unknown = error.object[error.start : error.end]
    return "".join(PLAIN.get(sign, "?") for sign in unknown), error.end


def allow_any_locale() -> None:
    """Make stdout and stderr accept all characters."""
    codecs.register_error(NAME, _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors=NAME)
