"""Requests from files: traces, sessions, and files for the load generator."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.core.load.traces import TracedRequest, TraceFigures, figures, parse_trace, scaled
from kvbench.core.scenario.scenario import Scenario, Trace
from kvbench.core.scenario.sections import Sessions
from kvbench.core.sessions.session_load import SessionLoad, load_arrays
from kvbench.core.sessions.session_source import SessionSource, source_of
from kvbench.errors import InputError
from kvbench.files import similar_files

MOST_BYTES = 2 * 2**30
"""Largest trace in bytes; checked before reading."""


def load_trace(trace: Trace) -> list[TracedRequest]:
    """First ``max_requests`` requests of a trace, with its time scale. Raises InputError."""
    return scaled(
        parse_trace(_text_of(trace), trace.path, trace.format), trace.time_scale, trace.max_requests
    )


def _text_of(trace: Trace) -> str:
    path = Path(trace.path)
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"the trace {path} is a folder, a pipe or a device, not a file")
        if path.stat().st_size > MOST_BYTES:
            raise InputError(
                f"{path} has more than {MOST_BYTES / 2**30:g} GiB", hint="cut it to the replayed part"
            )
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise InputError(
            f"the trace {path} cannot be read: {error.strerror or error}",
            hint=f"{similar_files(Path(path))}a relative path starts at the current folder",
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text: byte {error.start} is not UTF-8") from error


def trace_lengths(trace: Trace) -> tuple[int, int, int, int]:
    """A trace's mean prompt and output length, longest request and longest output, in tokens."""
    found = figures(load_trace(trace))
    means = max(1, round(found.mean_input_len)), max(1, round(found.mean_output_len))
    return *means, found.longest, found.longest_output


def require_fitting(scenario: Scenario, requests: Sequence[TracedRequest]) -> None:
    """Raise InputError if a request exceeds the engine's max_model_len."""
    longest = scenario.deployment.engine_options.longest_request
    if not longest:
        return
    if wrong := [request for request in requests if request.input_len + request.output_len > longest]:
        most = max(request.input_len + request.output_len for request in wrong)
        raise InputError(
            f"{len(wrong)} of the trace's {len(requests)} requests exceed the engine's max_model_len of "
            f"{longest}; the longest has {most} tokens",
            hint="raise max_model_len, or remove those requests from the file",
        )


def trace_summary(trace: Trace, load: TraceFigures) -> dict[str, Any]:
    return {"path": trace.path, "sha256": trace_digest(trace), "time_scale": trace.time_scale, **asdict(load)}


def trace_digest(trace: Trace) -> str:
    """SHA-256 of a trace's file. Raises InputError if unreadable."""
    return hashlib.sha256(_text_of(trace).encode()).hexdigest()


def write_requests(path: Path, requests: Sequence[TracedRequest]) -> None:
    """Write a load generator's file (``LoadSpec.requests_path``): one JSON object per line."""
    with path.open("w", encoding="ascii") as file:
        file.writelines(json.dumps(vars(request), separators=(",", ":")) + "\n" for request in requests)


def session_source(wanted: Sessions) -> SessionSource:
    """Read the corpus, if given. Raises InputError."""
    if wanted.source == "shape":
        return source_of(wanted, None)
    from kvbench.planning.corpus_files import load_corpus  # few loads read a corpus

    return source_of(wanted, load_corpus(Path(wanted.path), wanted.format))


def write_session_load(path: Path, load: SessionLoad) -> None:
    """Write a load generator's file (``LoadSpec.sessions_path``)."""
    with path.open("wb") as file:
        # A numpy before 2.1 stores the flag as an additional, unused array.
        np.savez(file, allow_pickle=False, **load_arrays(load))
