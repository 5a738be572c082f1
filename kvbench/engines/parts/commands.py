"""Command lines of engines: arguments from a mapping, and the version that a command reports."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from kvbench.core.engine_versions import version_in
from kvbench.errors import KvbenchError, LaunchError, MissingLibraryError

VERSION_TIMEOUT_S: Final = 120.0
"""vLLM imports PyTorch to report its version: seconds on a quiet machine, a minute on a busy one."""


def argv_of(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments by name: true is a bare flag, false its ``--no-`` form, null leaves it out.

    A list gives several words after the name, a mapping becomes JSON.
    """
    words: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, (list, tuple)):
            words += [f"--{flag}", *(_word(each) for each in value)]
        else:
            words += [f"--{flag}", _word(value)]
    return words


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (dict, list, bool)) else str(value)


def owned_flags(given: Mapping[str, Any], owned: Sequence[str]) -> list[str]:
    """The names among ``given`` that kvbench sets itself."""
    return [name for name in given if name.replace("_", "-").lstrip("-") in owned]


def found_command(command: str, env: Mapping[str, str]) -> str | None:
    """The executable that a command's first word means, or None."""
    return shutil.which(command, path=env.get("PATH", os.environ.get("PATH")))


def whole(arguments: Mapping[str, Any], *names: str) -> int:
    """The first of these arguments that is given as a number above 0; 1 if none is."""
    for name in names:
        with contextlib.suppress(TypeError, ValueError):
            if (number := int(arguments.get(name, 0))) > 0:
                return number
    return 1


def asked_version(command: tuple[str, ...], env: Mapping[str, str]) -> str:
    """The version that ``command --version`` reports, asked once in a process's life.

    Raises MissingLibraryError if there is no such command, LaunchError if it reports none in time.
    """
    answer = _ask_version(command, tuple(sorted(env.items())))
    if isinstance(answer, KvbenchError):
        raise answer
    return answer


@lru_cache(maxsize=16)
def _ask_version(command: tuple[str, ...], env: tuple[tuple[str, str], ...]) -> str | KvbenchError:
    """The version, or the error to raise: a command that hangs is not asked twice either."""
    argv = [*command, "--version"]
    shown = " ".join(argv)
    try:
        process = subprocess.Popen(
            argv,
            env={**os.environ, **dict(env)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return MissingLibraryError(
            f"cannot run {shown}: {error.strerror}",
            hint="name the command in deployment.engine_options.command",
        )
    with process:
        try:
            output, said = process.communicate(timeout=VERSION_TIMEOUT_S)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # not yet reaped, so the group is still its own
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return LaunchError(
                f"{shown} told no version within {VERSION_TIMEOUT_S:g} s",
                hint="set deployment.engine_options.version",
            )
    version = version_in(output)
    if process.returncode != 0 or not version:
        last = [line for line in (said or output).splitlines() if line.strip()][-3:]
        return LaunchError(
            f"{shown} told no version (status {process.returncode})"
            + "".join(f"\n  {line}" for line in last),
            hint="set deployment.engine_options.version, or repair that installation",
        )
    return version
