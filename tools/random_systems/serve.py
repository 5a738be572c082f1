"""``python -m tools.random_systems.serve SEED INDEX``: a drawn system as the COMMAND of a simulated search.

One JSON object a line on standard input, times in seconds:

- ``{"type": "trial", "seed": 7, "starts_at_s": 812.4, "arrivals_s": […], "input_len": […],
  "output_len": […]}`` — arrivals from the trial's start, which is at ``starts_at_s`` of the virtual clock;
  lengths in tokens, one for each request, or one number for all. The response is one line
  ``{"first_token_s": […], "last_token_s": […]}``, from the trial's start, in the order of the requests; null
  for never.
- ``{"type": "end", "cut_at_s": 12.1, "cancelled": […]}`` — the trial ended at that time: later requests
  never arrived, and the client cancelled those with these numbers (0 is the trial's first). No response. The
  server's unfinished work remains when the next trial starts. Without this line all requests arrived.

The process ends with its standard input. It exits with code 2 and a message on standard error for an invalid
line.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Final, Literal, TextIO

import numpy as np
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from .family import draw, seed_of
from .simulate import State, end, trial
from .system import FloatArray, System

EXIT_BAD_INPUT: Final = 2
MOST_REQUESTS: Final = 10_000_000
Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Length = Annotated[float, Field(ge=1, allow_inf_nan=False)]
Lengths = Annotated[list[Length], Field(max_length=MOST_REQUESTS)] | Length


class Trial(BaseModel, strict=True):
    type: Literal["trial"]
    seed: int = Field(ge=0)
    starts_at_s: Time
    arrivals_s: list[Time] = Field(max_length=MOST_REQUESTS)
    input_len: Lengths
    output_len: Lengths


class End(BaseModel, strict=True):
    type: Literal["end"]
    cut_at_s: Time
    cancelled: list[int] = []


MESSAGE: Final[TypeAdapter[Trial | End]] = TypeAdapter(Annotated[Trial | End, Field(discriminator="type")])


class BadLineError(ValueError):
    """An invalid line; the message gives the reason."""


class Session:
    def __init__(self, system: System) -> None:
        self._system = system
        self._state = State()
        self._running = False

    def answer(self, line: str) -> str | None:
        """Process one line; return the response, None for the end of a trial. Raises BadLineError."""
        try:
            message = MESSAGE.validate_json(line)
            if isinstance(message, Trial):
                return self._trial(message)
            self._end(message)
        except ValidationError as error:
            wrong = error.errors()[0]
            raise BadLineError(f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}".lstrip(": ")) from None
        except (ValueError, IndexError) as error:
            raise BadLineError(str(error)) from None
        return None

    def _trial(self, message: Trial) -> str:
        count = len(message.arrivals_s)
        lengths = []
        for name, given in (("input_len", message.input_len), ("output_len", message.output_len)):
            values = given if isinstance(given, list) else [given] * count
            if len(values) != count:
                raise ValueError(f"{name} has {len(values)} values, arrivals_s {count}")
            lengths.append(np.array(values, np.float64))
        at = np.array(message.arrivals_s, np.float64)
        first_s, last_s, self._state = trial(
            self._system, at, lengths[0], lengths[1], message.starts_at_s, message.seed, self._state
        )
        self._running = True
        return json.dumps({"first_token_s": nulls(first_s), "last_token_s": nulls(last_s)}, allow_nan=False)

    def _end(self, message: End) -> None:
        if not self._running:
            raise ValueError("the end of a trial, but there is none")
        self._state = end(self._system, self._state, message.cut_at_s, message.cancelled)
        self._running = False


def nulls(times: FloatArray) -> list[float | None]:
    return [time if math.isfinite(time) else None for time in times.tolist()]


def serve(system: System, lines: Iterable[str], output: TextIO) -> None:
    """Respond to each line. Raises BadLineError with the line's number."""
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
