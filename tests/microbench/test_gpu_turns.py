"""`--memory cuda` spreads its workers over the GPUs; the CUDA driver is a stand-in with FAKE_GPUS GPUs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbench.core.transfers.records import Case
from kvbench.microbench.options import Settings
from kvbench.microbench.sides import Side, Teams, worker_key

DRIVER = r"""
#include <stdlib.h>
#include <string.h>
typedef unsigned long long u64;
static int current = -1;
static int count(void) { return atoi(getenv("FAKE_GPUS")); }
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *found) { *found = count(); return 0; }
int cuDeviceGet(int *handle, int number) { *handle = number; return number < count() ? 0 : 101; }
int cuDevicePrimaryCtxRetain(void **context, int handle) { *context = (void *)(long)(handle + 1); return 0; }
int cuCtxSetCurrent(void *context) { current = (int)(long)context - 1; return 0; }
int cuMemGetInfo_v2(size_t *room, size_t *total) { *room = *total = (size_t)1 << (20 + current); return 0; }
int cuMemAlloc_v2(u64 *pointer, size_t size) { *pointer = (long)malloc(size); return 0; }
int cuMemsetD8_v2(u64 to, unsigned char byte, size_t size) { memset((void *)to, byte, size); return 0; }
int cuMemcpyHtoD_v2(u64 to, void *from, size_t size) { memcpy((void *)to, from, size); return 0; }
int cuMemcpyDtoH_v2(void *to, u64 from, size_t size) { memcpy(to, (void *)from, size); return 0; }
int cuGetErrorName(int code, const char **name) { *name = "CUDA_ERROR_INVALID_DEVICE"; return 0; }
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "cuda.c").write_text(DRIVER)
    words = [compiler, "-shared", "-fPIC", "-w", "-o", str(folder / "libcuda.so.1"), str(folder / "cuda.c")]
    subprocess.run(words, check=True, timeout=60)
    return folder


def with_driver(folder: Path, gpus: int, code: str) -> str:
    env = {**os.environ, "LD_LIBRARY_PATH": str(folder), "FAKE_GPUS": str(gpus)}
    done = subprocess.run(
        [sys.executable, "-c", f"from kvbench.processes.transfer_worker import memory\n{code}"], env=env,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.parametrize(("gpus", "turns"), [(1, [0, 0, 0]), (2, [0, 1, 0]), (8, [0, 1, 2])])
def test_a_turn_is_a_gpu_of_those_that_are_there(driver: Path, gpus: int, turns: list[int]) -> None:
    printed = with_driver(driver, gpus, "print([memory.gpu_of_turn(turn) for turn in range(3)])")
    assert printed.strip() == str(turns)


def test_without_a_gpu_it_is_refused(driver: Path) -> None:
    assert "CUDA shows no GPU to this process" in with_driver(driver, 0, "memory.gpu_of_turn(0)")


def test_memory_is_on_the_gpu_of_its_turn_and_keeps_its_bytes(driver: Path) -> None:
    """Each of these GPUs has twice the memory of the one before."""
    code = """
from kvbench.transfer.base import Layout
layout, content = Layout(2, 3, 4096), memory.Content(7, 1)
buffer = memory.allocate("cuda", layout.nbytes, memory.gpu_of_turn(1))
memory.fill(buffer, layout, content)
print(repr(memory.difference(buffer, layout, [0, 1, 2], content, [0, 1, 2])))
print(memory.difference(buffer, layout, [0, 1, 2], content, [0, 2, 1]))
print(len(str(memory.allocate("cuda", 3 << 19, 1).address)) > 0)
memory.allocate("cuda", 3 << 19, 0)
"""
    printed = with_driver(driver, 2, code)
    assert printed.startswith("''\nregion 0, block 1: byte 0 is not what was sent\nTrue\n")
    assert "does not fit into GPU 0: 1,048,576 bytes are free" in printed


def case(**given: Any) -> Case:
    return worker_key(Case("nixl", "tcp", "write", 4096, 1, **{"memory": "cuda", **given}))


def turns_of(key: Case, one: Side, other: Side) -> list[tuple[str, int]]:
    teams = Teams({"initiator": one, "target": other}, Settings(), workers=None)  # type: ignore[arg-type]
    counts = (("initiator", key.initiators), ("target", key.targets))
    return [
        (role, teams._gpu(key, role, number)["gpu_turn"]) for role, count in counts for number in range(count)
    ]


def test_on_one_host_every_worker_has_its_own_turn() -> None:
    here = Side()
    assert turns_of(case(), here, here) == [("initiator", 0), ("target", 1)]
    assert [turn for _, turn in turns_of(case(initiators=3), here, here)] == [0, 1, 2, 3]
    named = Side(name="a", elsewhere=True), Side(name="a", elsewhere=True)
    assert [turn for _, turn in turns_of(case(targets=2), *named)] == [0, 1, 2]


def test_on_two_hosts_each_side_begins_at_its_first_gpu() -> None:
    peer = Side("10.0.0.2", ("ssh", "b"), elsewhere=True)
    assert turns_of(case(initiators=2), Side("10.0.0.1"), peer) == [
        ("initiator", 0),
        ("initiator", 1),
        ("target", 0),
    ]
    assert (
        Teams({"initiator": peer, "target": peer}, Settings(), None)._gpu(  # type: ignore[arg-type]
            case(memory="host"), "target", 0
        )
        == {}
    )
