"""What a command writes to, and how it ends: with an exit code, and with an error said in words."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from kvbench.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, KvbenchError

if TYPE_CHECKING:
    from rich.console import Console

TRACEBACK_ENV = "KVBENCH_TRACEBACK"
_UNFORESEEN = (
    "nobody foresaw this: a file that was read may be damaged or changed by hand, or it is a mistake of "
    f"kvbench; {TRACEBACK_ENV}=1 shows where it happened"
)


def console() -> Console:
    """The terminal; a pipe or a file gets long lines, and none folded."""
    from rich.console import Console

    terminal = Console(highlight=False)
    return terminal if terminal.is_terminal else Console(highlight=False, width=160, soft_wrap=True)


def with_exit_code(function: Callable[..., int | None]) -> Callable[..., None]:
    """A command for typer: what ``function`` returns is the exit code, None is 0.

    An error that it raises is said clearly and brings its own.
    """

    @functools.wraps(function)
    def run(**options: Any) -> None:
        with _errors_in_words():
            raise typer.Exit(function(**options) or EXIT_OK)

    return run


@contextmanager
def _errors_in_words() -> Iterator[None]:
    """Errors become one clear message with a hint and the right exit code; SIGTERM acts like Ctrl-C."""
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    except KvbenchError as error:
        typer.echo(f"kvbench: {error.message}", err=True)
        if error.hint:
            typer.echo(f"hint: {error.hint}", err=True)
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
        typer.echo(f"kvbench: {type(error).__name__}: {error}", err=True)
        typer.echo(f"hint: {_UNFORESEEN}", err=True)
        raise typer.Exit(EXIT_FAILED) from error
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
