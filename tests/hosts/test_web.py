"""A server that does what it likes costs a question its deadline and little memory, and nothing else."""

import gzip
import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable

import httpx
import pytest
from hostile_modes import MODES, hostile, whole

from kvbench.hosts import web

DEADLINE_S = float(os.environ.get("KVBENCH_HOSTILE_S", "0.3"))
"""More of it: `make hostile`."""
LATE_S = 4.0
"""For parsing what came in time, on a busy machine."""
MEMORY_BYTES = 64 * 2**20
ASKING = r"""
import json, re, sys, time
from pathlib import Path
import httpx
from kvbench.hosts import web
from kvbench.hosts.telemetry import parse_metrics, scrape
parse_metrics("a 1")
url, deadline_s, modes = sys.argv[1], float(sys.argv[2]), sys.argv[3:]

def peak():  # not ru_maxrss, which begins with that of the parent
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text()).group(1))

def as_json(client, url):
    try:
        return str(web.json_of(client.get(url))["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        return type(error).__name__

def as_page(client, url):
    return scrape(client, url, deadline_s)

before = peak()
for mode in modes:
    for ask in (as_json, as_page):
        with web.client(timeout_s=deadline_s) as client:
            began = time.monotonic()
            ask(client, f"{url}/{mode}/x")
            print(json.dumps([mode, ask.__name__, time.monotonic() - began, peak() - before]), flush=True)
"""


def test_there_are_sixty_ways() -> None:
    assert len(MODES) >= 60


def test_no_server_costs_more_than_the_deadline_and_64_mb() -> None:
    with hostile() as url:
        words = [sys.executable, "-c", ASKING, url, str(DEADLINE_S), *MODES]
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=110 + 3 * DEADLINE_S * len(MODES), check=False
        )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (done.stderr, rows[-1:])
    print(f"slowest: {max(rows, key=lambda row: row[2])}; memory at last: {rows[-1][3] >> 20} MiB")
    assert len(rows) == 2 * len(MODES)
    assert [row for row in rows if row[2] > DEADLINE_S + LATE_S] == []
    assert [row for row in rows if row[3] > MEMORY_BYTES] == []


@pytest.mark.parametrize(("coding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_what_a_server_packs_unasked_is_unpacked(coding: str, pack: Callable[[bytes], bytes]) -> None:
    body = json.dumps({"data": [{"id": "tiny" * 10**5}]}).encode()
    MODES["packed"] = lambda: whole(pack(body), b"content-encoding: " + coding.encode())
    with hostile() as url, web.client() as client:
        assert web.json_of(client.get(f"{url}/packed/x"))["data"][0]["id"] == "tiny" * 10**5


@pytest.mark.parametrize("mode", ["slow_body", "slow_headers", "slow_continue", "half_an_answer"])
def test_a_late_answer_is_a_timeout(mode: str) -> None:
    with hostile() as url, web.client(timeout_s=0.5) as client:
        began = time.monotonic()
        with pytest.raises(httpx.TimeoutException):
            client.get(f"{url}/{mode}/x")
        assert time.monotonic() - began < 0.5 + LATE_S


@pytest.mark.parametrize("mode", ["endless_to_the_end", "gzip_bomb", "packed_in_what_nobody_asked_for"])
def test_what_is_too_long_or_packed_oddly_is_no_answer(mode: str) -> None:
    with (
        hostile() as url,
        web.client() as client,
        pytest.raises(httpx.RemoteProtocolError, match="the answer"),
    ):
        client.get(f"{url}/{mode}/x")


@pytest.mark.parametrize("mode", ["deep_arrays", "deep_objects", "wide_arrays", "huge_number"])
def test_json_that_is_too_deep_or_long_is_a_value_error(mode: str) -> None:
    with hostile() as url, web.client() as client, pytest.raises((ValueError, httpx.RemoteProtocolError)):
        web.json_of(client.get(f"{url}/{mode}/x"))
