"""The exception tree. Each error says what happened, and its hint says what to do.

    KvbenchError                 exit code 1
    ├── InputError               2   what the user wrote cannot be used
    │   └── ScenarioError            all mistakes of one scenario file
    ├── MissingLibraryError      1   a native library is absent or does not load
    ├── LaunchError              1   a process could not be started or did not get ready
    │   ├── PortInUseError
    │   ├── ProcessDiedError
    │   └── ProcessHungError
    ├── TransferError            1   a KV transfer failed, or did not end within its deadline
    ├── LabError                 1   a lab of network namespaces could not be set up, changed or taken down
    ├── StoreError               1   a run folder cannot be read or written
    │   └── NewerSchemaError
    └── ServerError              1   the server under test answered something unusable

``EXIT_CODES`` has all exit codes and their meanings, as docs/commands.md and ``--help`` show them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_SLO_NOT_MET = 3
EXIT_WORSE = 4
EXIT_NOT_VERIFIED = 5
EXIT_INCONCLUSIVE = 6
EXIT_INTERRUPTED = 130

EXIT_CODES = {
    EXIT_OK: "done",
    EXIT_FAILED: "failed; verify: not sound",
    EXIT_BAD_INPUT: "bad input; plan: a sweep cannot start",
    EXIT_SLO_NOT_MET: "measured, but no rate met the SLO",
    EXIT_WORSE: "a rate got worse (compare --ci)",
    EXIT_NOT_VERIFIED: "not verified: part of a run could not be checked (verify)",
    EXIT_INCONCLUSIVE: "inconclusive: a rate may have got worse (compare --ci)",
    EXIT_INTERRUPTED: "interrupted",
}
"""Meaning of each exit code."""


@dataclass(frozen=True)
class Problem:
    """Why something cannot be used here, and the command or change that fixes it."""

    reason: str
    fix: str = ""


class KvbenchError(Exception):
    """Base of all errors that a user may see: a message, a hint, an exit code."""

    exit_code: ClassVar[int] = EXIT_FAILED

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InputError(KvbenchError):
    """Something the user wrote cannot be used."""

    exit_code = EXIT_BAD_INPUT


class ScenarioError(InputError):
    """A scenario file with mistakes; the message lists all of them with path and line."""


class MissingLibraryError(KvbenchError):
    """A native library is not installed, or does not load on this machine."""


class LaunchError(KvbenchError):
    """A process could not be started, or did not get ready within its deadline."""


class PortInUseError(LaunchError):
    """A port that the plan needs is taken."""

    @classmethod
    def at(cls, host: str, port: int) -> PortInUseError:
        return cls(f"port {host}:{port} is in use", hint="choose another port, or stop what listens there")


class ProcessDiedError(LaunchError):
    """A process that should be running has ended; the message carries its last lines."""


class ProcessHungError(LaunchError):
    """A process exists but makes no progress: it is stopped, or no longer responds."""


class TransferError(KvbenchError):
    """A KV transfer failed, or did not end within its deadline."""


class LabError(KvbenchError):
    """A lab of network namespaces could not be set up, changed or taken down."""


class StoreError(KvbenchError):
    """A run folder cannot be read or written."""


class NewerSchemaError(StoreError):
    """A run folder was written by a newer kvbench."""


class ServerError(KvbenchError):
    """The server under test answered something that cannot be used."""
