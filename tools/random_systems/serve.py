"""``python -m tools.random_systems.serve SEED INDEX``: a drawn system as the COMMAND of a simulated search.

One JSON object a line on standard input, times in seconds:

- ``{"type": "trial", "seed": 7, "starts_at_s": 812.4, "arrivals_s": […], "input_len": […],
  "output_len": […]}`` — arrivals from the trial's start, which is at ``starts_at_s`` of the virtual clock;
  lengths in tokens, one for each request, or one number for all. Answered by one line
  ``{"first_token_s": […], "last_token_s": […]}``, from the trial's start, in the order of the requests; null
  for never.
- ``{"type": "end", "cut_at_s": 12.1, "cancelled": […]}`` — the trial was ended: what was to arrive later
  never came, and the requests with these numbers (0 is the first of the trial) were dropped by their client
  then. No answer. What the server still works on is there when the next trial starts. Without it all
  requests came.

Ends with standard input. Exit code 2, with a sentence on standard error, for a line that makes no sense.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TextIO

import numpy as np

from .family import draw, seed_of
from .simulate import State, end, trial
from .system import FloatArray, System

EXIT_BAD_INPUT: Final = 2
MOST_REQUESTS: Final = 10_000_000


class BadLineError(ValueError):
    """A line that cannot be answered; the text says why."""


class Session:
    """One search's trials on one system, in the order of the virtual clock."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._state = State()
        self._running = False

    def answer(self, line: str) -> str | None:
        """The answer to a line, None if there is none. Raises BadLineError."""
        try:
            message = json.loads(line)
        except ValueError as error:
            raise BadLineError(f"this is no JSON: {error}") from None
        if not isinstance(message, dict):
            raise BadLineError("a message is a JSON object")
        kind = message.get("type")
        if kind == "trial":
            return self._trial(message)
        if kind == "end":
            self._end(message)
            return None
        raise BadLineError(f"type is {kind!r}, not trial or end")

    def _trial(self, message: Mapping[str, Any]) -> str:
        seed = message.get("seed")
        if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
            raise BadLineError(f"seed must be a whole number of 0 or more, not {seed!r}")
        starts_at_s = _number(message, "starts_at_s")
        arrivals_s = _numbers(message, "arrivals_s", None, least=0.0)
        count = len(arrivals_s)
        lengths = [_numbers(message, name, count, least=1.0) for name in ("input_len", "output_len")]
        try:
            first_s, last_s, self._state = trial(
                self._system, arrivals_s, lengths[0], lengths[1], starts_at_s, seed, self._state
            )
        except ValueError as error:
            raise BadLineError(str(error)) from None
        self._running = True
        told = {"first_token_s": _nulls(first_s), "last_token_s": _nulls(last_s)}
        return json.dumps(told, allow_nan=False)

    def _end(self, message: Mapping[str, Any]) -> None:
        if not self._running:
            raise BadLineError("the end of a trial, but there is none")
        cancelled = message.get("cancelled", [])
        if not isinstance(cancelled, list) or not all(type(each) is int for each in cancelled):
            raise BadLineError("cancelled must be a list of numbers of requests")
        try:
            self._state = end(self._system, self._state, _number(message, "cut_at_s"), cancelled)
        except IndexError as error:
            raise BadLineError(str(error)) from None
        self._running = False


def _number(message: Mapping[str, Any], name: str) -> float:
    value = message.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise BadLineError(f"{name} must be a number of 0 or more, not {value!r}")
    return float(value)


def _numbers(message: Mapping[str, Any], name: str, count: int | None, least: float) -> FloatArray:
    """A list of finite numbers; one number stands for all where the count is known."""
    value = message.get(name)
    if count is not None and isinstance(value, (int, float)):
        value = [value] * count
    if not isinstance(value, list) or len(value) > MOST_REQUESTS:
        raise BadLineError(f"{name} must be a list of numbers")
    if count is not None and len(value) != count:
        raise BadLineError(f"{name} has {len(value)} values, arrivals_s {count}")
    if not all(type(each) in (int, float) for each in value):
        raise BadLineError(f"{name} must be a list of numbers")
    numbers: FloatArray = np.array(value, np.float64)
    if not np.all(np.isfinite(numbers) & (numbers >= least)):
        raise BadLineError(f"{name} must have finite values of {least:g} or more")
    return numbers


def _nulls(times: FloatArray) -> list[float | None]:
    return [each if math.isfinite(each) else None for each in times.tolist()]


def serve(system: System, lines: Iterable[str], output: TextIO) -> None:
    """Answers line by line until there is none. Raises BadLineError with the line's number."""
    session = Session(system)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            answer = session.answer(line)
        except BadLineError as error:
            raise BadLineError(f"line {number}: {error}") from None
        if answer is not None:
            output.write(answer + "\n")
            output.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.random_systems.serve", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("seed", metavar="SEED", help="develop, check, release, or a number")
    parser.add_argument("index", metavar="INDEX", type=int, help="which system of it, from 0")
    chosen = parser.parse_args(arguments)
    try:
        seed = seed_of(chosen.seed)
    except ValueError as error:
        parser.error(str(error))
    if chosen.index < 0:
        parser.error("INDEX is 0 or more")
    try:
        serve(draw(seed, chosen.index), sys.stdin, sys.stdout)
    except BadLineError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except BrokenPipeError:
        sys.stderr.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
