"""What the tests on a real Ray cluster and on a real Slurm share: waiting, channels, a run on two nodes."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench.launchers.agents.channel import Channel, ChannelClosedError

GONE_S = 10.0
"""How long something may remain after any end."""
HOSTS = {"prefill": ("pre0",), "decode": ("dec0",), "router": ("pre0",), "loadgen": ("pre0",)}
SCENARIO = """
version: 1
model: tiny
deployment:
  base_port: 0
  engine_options: {timing: quick, time_scale: 5}
  %s
connectors: [tcp]
workload: {input_len: 64, output_len: 4}
slo: {ttft_ms: 5000, tpot_ms: 1000}
search: {trial_s: 3, max_trial_s: 3, min_requests: 10}
load: {workers: 1}
"""


def until(done: Callable[[], bool], deadline_s: float) -> bool:
    deadline = time.monotonic() + deadline_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def tagged(tag: str) -> list[int]:
    """The running processes that a tag was given to."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                if f"KVBENCH_RUN_TAG={tag}\0".encode() in (path / "environ").read_bytes():
                    found.append(int(path.name))
    return found


def received(channel: Channel, deadline_s: float = 60.0) -> bytes:
    line = channel.receive(deadline_s)
    assert line is not None
    return line


def ended(channel: Channel, deadline_s: float) -> str:
    """Why a channel ended, once it has."""
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        try:
            channel.receive(1.0)
        except ChannelClosedError as error:
            return error.message
    pytest.fail(f"the channel to {channel.host} has not ended in {deadline_s:g} s")


def run(folder: Path, deployment: str, *words: str) -> Path:
    """One ``kvbench bench`` with a launcher and its options; returns its run folder."""
    scenario, results = folder / "two-nodes.yaml", folder / "results"
    scenario.write_text(SCENARIO % deployment)
    command = [sys.executable, "-c", "from kvbench.cli import main; main()", "bench", str(scenario)]
    command += ["--rate", "4", "--output", str(results), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    (found,) = results.iterdir()
    assert (found / "trials.jsonl").exists(), done.stdout + done.stderr
    return found


def whole_trial(folder: Path) -> dict[str, Any]:
    """The one trial of a run, all of whose requests were completed."""
    (trial,) = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    assert trial["summary"]["completed"] == trial["summary"]["sent"] > 0
    return trial


def require_nothing_after_a_kill(code: str, *words: str) -> None:
    """Kill what has agents on nodes under the tag ``orphan``; the agents end, too."""
    owner = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with owner.stdin, owner.stdout:
        assert owner.stdout.readline() == b"up\n"
        assert len(tagged("orphan")) >= 2
        owner.kill()
        owner.wait(10)
        assert until(lambda: not tagged("orphan"), GONE_S)
