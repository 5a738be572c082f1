"""Loads of sessions that are really sent, from this thread, and what comes of them."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from hostile import StopAt, spec_for

from kvbench.core.records import RequestRecord
from kvbench.core.sessions.corpus import Session, Turn
from kvbench.core.sessions.session_load import SessionLoad
from kvbench.planning.load_files import write_session_load
from kvbench.processes.loadgen.__main__ import prepare_dispatch
from kvbench.processes.loadgen.plan import TokenEncoder
from kvbench.processes.loadgen.run import LoadRun
from kvbench.processes.loadgen.session_schedule import SessionPrompts, SessionSchedule, read_session_load
from kvbench.processes.loadgen.sockets.loop import SocketLoop

SIZE = 16
VOCAB = 32_000


def turn(
    blocks: list[int], think_s: float = 0.05, out: int = 6, below: tuple[Session, ...] = (), more: int = 5
) -> Turn:
    """A prompt of these blocks of 16 tokens and some more tokens."""
    return Turn(SIZE * len(blocks) + more, out, think_s, 0.0, np.array(blocks, np.int64), below)


def prompts_of(load: SessionLoad, seed: int = 1, vocab_size: int = VOCAB) -> SessionPrompts:
    found = SessionPrompts(load, vocab_size, seed, TokenEncoder(vocab_size).items)
    found.prepare()
    return found


def tokens_of(prompts: SessionPrompts, place: int) -> list[int]:
    tokens: list[int] = json.loads(prompts.json(place))
    return tokens


def sent(
    folder: Path, load: SessionLoad, url: str, stop_after_s: float = 30.0, **changes: Any
) -> tuple[list[RequestRecord], dict[str, Any], list[dict[str, Any]]]:
    """A trial: its records in the order of sending, the end event, the progress events."""
    path = folder / "sessions.npz"
    write_session_load(path, load)
    wanted: dict[str, Any] = {"vocab_size": VOCAB, "timeout_s": 10.0, "sessions_path": str(path), **changes}
    spec = spec_for(url, **wanted)
    spec.check()
    loop = SocketLoop()
    read = read_session_load(spec.sessions_path)
    pools, begin = prepare_dispatch(spec, (), loop)
    progress: list[dict[str, Any]] = []

    def report(line: dict[str, Any]) -> bool:
        progress.append(line)
        return True

    schedule = SessionSchedule(read, prompts_of(read, spec.seed, spec.vocab_size))
    trial = LoadRun(spec, schedule, loop, pools, report, schedule.filling(begin))
    end = trial.run(StopAt(time.monotonic() + stop_after_s))
    progress += trial.last_lines()
    for pool in pools:
        pool.close()
    loop.close()
    return trial.records, end, progress
