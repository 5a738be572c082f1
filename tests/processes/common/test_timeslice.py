"""A shorter time slice: asked of the real kernel, in a process of its own."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

ASK = """
import sys, time
from kvbench.processes.common.entry import shorten_slice
print(shorten_slice())
print(open("/proc/self/sched").read())
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="the call's number is not known")
def test_the_kernel_takes_the_call_and_grants_the_slice_where_it_knows_it() -> None:
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    granted, _, stats = done.stdout.partition("\n")
    assert granted == "True"
    # Kernels before 6.12 tell no slice, or keep their own.
    slices = [line.split()[-1] for line in stats.splitlines() if line.startswith("se.slice")]
    major, minor = (int(part) for part in platform.release().split(".")[:2])
    if slices and (major, minor) >= (6, 12) and Path("/proc/self/sched").exists():
        assert float(slices[0]) == pytest.approx(100_000, rel=0.01)


def test_sleeps_end_without_slack() -> None:
    ask = "from kvbench.processes.common.entry import sleep_exactly; print(sleep_exactly())"
    tell = "import ctypes; print(ctypes.CDLL(None).prctl(30, 0, 0, 0, 0))"  # PR_GET_TIMERSLACK
    done = subprocess.run(
        [sys.executable, "-c", f"{ask}\n{tell}"], capture_output=True, text=True, timeout=30
    )
    assert done.stdout.split() == ["True", "1"], done.stderr
