"""A server under test that does what it likes costs a load generator its deadline and little memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from hostile import DONE, HEAD, LAST, TOKEN, USAGE, chunk
from hostile_modes import CHUNKED, MODES, OK, Mode, endless, hostile, slowly, whole

TIMEOUT_S = float(os.environ.get("KVBENCH_HOSTILE_S", "0.4"))
"""More of it: KVBENCH_HOSTILE_S=10 (`make hostile`)."""
BUSY_S = 2.0
"""CPU time for what came in time."""
LATE_S = 40.0
"""The clock goes on while others have the machine."""
MEMORY_BYTES = 64 * 2**20
SUPPORT = Path(__file__).parents[2] / "support"


def event(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"


NESTED: Final = b'{"choices":' + b"[" * 10**5
STREAMS: Final[dict[str, Mode]] = {
    "endless_tokens": lambda: endless(HEAD, chunk(TOKEN * 1000)),
    "endless_empty_tokens": lambda: endless(HEAD, chunk(TOKEN.replace(b" a", b"") * 1000)),
    "endless_comments": lambda: endless(HEAD, chunk(b": ping\n\n" * 1000)),
    "endless_data_lines": lambda: endless(HEAD, chunk(b"data: {\n" * 1000)),
    "endless_event_name": lambda: endless(HEAD, chunk(b"event: " + b"a" * 65536)),
    "endless_blank_lines": lambda: endless(HEAD, chunk(b"\n" * 65536)),
    "endless_line": lambda: endless(HEAD, chunk(b'data: {"choices":[{"text":"'), chunk(b"a" * 65536)),
    "endless_usage": lambda: endless(HEAD, chunk(USAGE * 1000)),
    "endless_done": lambda: endless(HEAD, chunk(DONE * 1000)),
    "endless_bytes_a_chunk": lambda: endless(HEAD, b"1\r\na\r\n" * 1000),
    "endless_chunk_extension": lambda: endless(HEAD, b"1;", b"a" * 65536),
    "slow_tokens": lambda: slowly(HEAD, chunk(TOKEN)),
    "long_text": lambda: [HEAD, chunk(event(b'{"choices":[{"text":"' + b"a" * 4 * 10**6 + b'"}]}')), LAST],
    "nested": lambda: [HEAD, chunk(event(NESTED)), LAST],
    "many_choices": lambda: [HEAD, chunk(event(b'{"choices":[' + b"{}," * 10**6 + b"{}]}")), LAST],
    "huge_count": lambda: [HEAD, chunk(USAGE.replace(b"3", b"9" * 400)), chunk(DONE), LAST],
    "negative_count": lambda: [HEAD, chunk(USAGE.replace(b"3", b"-3")), chunk(DONE), LAST],
    "count_of_a_kind": lambda: [HEAD, chunk(USAGE.replace(b"3", b'{"a":[]}')), chunk(DONE), LAST],
    "no_utf8_text": lambda: [HEAD, chunk(TOKEN.replace(b" a", b"\xff\xfe")), chunk(DONE), LAST],
    "surrogate_text": lambda: [HEAD, chunk(TOKEN.replace(b" a", b"\\ud800")), chunk(DONE), LAST],
    "escapes_in_text": lambda: [HEAD, chunk(TOKEN.replace(b" a", b"\\u001b[31m")), chunk(DONE), LAST],
    "error_of_megabytes": lambda: whole(b"\x1b[31m" * 10**6, status=b"HTTP/1.1 500 No\r\n"),
    "error_event_of_megabytes": lambda: [HEAD, chunk(event(b'{"error":"' + b"a" * 4 * 10**6 + b'"}')), LAST],
    "done_at_once": lambda: [HEAD, chunk(DONE), LAST],
    "tokens_after_the_end": lambda: [HEAD, chunk(DONE), LAST, *([chunk(TOKEN)] * 1000)],
    "two_answers": lambda: [HEAD, chunk(TOKEN), chunk(DONE), LAST, HEAD, chunk(TOKEN), chunk(DONE), LAST],
    "gzip_of_events": lambda: whole(MODES_BOMB(), b"content-encoding: gzip"),
}
ALL: Final[dict[str, Mode]] = {**MODES, **STREAMS}


def MODES_BOMB() -> bytes:  # noqa: N802
    return list(MODES["gzip_bomb"]())[1]


ASKING = r"""
import json, re, sys, time
from pathlib import Path
sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1]).parents[1])]
from hostile import spec_for, trial_here
url, timeout_s, modes = sys.argv[2], float(sys.argv[3]), sys.argv[4:]

def peak():  # not ru_maxrss, which begins with that of the parent
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text()).group(1))

trial_here(spec_for(url, path="/done_at_once/x", num_requests=1, timeout_s=timeout_s), warm=0)
before = peak()
for mode in modes:
    began, cpu = time.monotonic(), time.process_time()
    spec = spec_for(url, path=f"/{mode}/x", num_requests=2, timeout_s=timeout_s)
    records, end, _ = trial_here(spec, warm=0)
    assert len(records) == 2 and end["reason"] == "complete", (mode, end)
    ok = [record.ok for record in records]
    row = [mode, ok, time.monotonic() - began, peak() - before, time.process_time() - cpu]
    print(json.dumps(row), flush=True)
"""


@pytest.mark.timeout(300 + 3 * TIMEOUT_S * len(ALL))
def test_no_server_costs_a_load_generator_more_than_the_deadline_and_64_mb() -> None:
    with hostile(ALL) as url:
        words = [sys.executable, "-c", ASKING, str(SUPPORT), url, str(TIMEOUT_S), *ALL]
        limit_s = 280 + 2 * TIMEOUT_S * len(ALL)
        done = subprocess.run(words, capture_output=True, text=True, timeout=limit_s, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (done.stderr[-2000:], rows[-1:])
    slowest, largest = max(rows, key=lambda row: row[2]), max(rows, key=lambda row: row[3])
    print(f"slowest: {slowest[0]} {slowest[2]:.2f} s; memory at last: {largest[3] >> 20} MiB")
    assert [row[0] for row in rows] == list(ALL)
    assert len(rows) >= 80
    assert [row for row in rows if row[4] > TIMEOUT_S + BUSY_S] == []
    assert [row for row in rows if row[2] > TIMEOUT_S + LATE_S] == []
    assert [row for row in rows if row[3] > MEMORY_BYTES] == []
    assert [row[0] for row in rows if any(row[1])] == [], "an answer that is none was taken for one"


def test_the_modes_are_hostile_and_a_good_answer_is_none_of_them() -> None:
    good: dict[str, Mode] = {"good": lambda: [HEAD, *map(chunk, (TOKEN, TOKEN, TOKEN, USAGE, DONE)), LAST]}
    good["done_at_once"] = STREAMS["done_at_once"]
    with hostile(good) as url:
        words = [sys.executable, "-c", ASKING, str(SUPPORT), url, "5", "good"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert json.loads(done.stdout)[1] == [True, True], done.stderr
    assert OK
    assert CHUNKED
