"""The checks for a machine with a GPU: all of them but the GPU itself, which is a fake or not there."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import psutil
import pytest
from fake_cuda import copied, fake_cuda

from kvbench import transfer
from tools.gpu import checks, driver, kit, one, run, start
from tools.gpu.checks import CHECKS, TCP_REFUSALS
from tools.gpu.result import Check, CheckFailedError, Figures, Result, SkippedError

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests/recorded"
BAD = "tests.support.gpu_checks"
no_driver = pytest.mark.skipif(driver.there(), reason="there is an NVIDIA driver")


def nothing(folder: Path) -> Figures:
    return {"folder": str(folder)}


# --- the runner


def test_a_check_that_hangs_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_CHECKS_PID", str(tmp_path / "pid"))
    found = run.run_one(Check("hangs", nothing), 3.0, BAD)
    assert (found.status, found.text) == ("failed", "not done within 3 s")
    with contextlib.suppress(psutil.NoSuchProcess):  # dead, and gone or not yet waited for
        assert psutil.Process(int((tmp_path / "pid").read_text())).status() == psutil.STATUS_ZOMBIE


def test_a_check_that_aborts_says_how_it_ended_and_its_last_lines() -> None:
    found = run.run_one(Check("aborts", nothing), 30.0, BAD)
    assert (found.status, found.text) == ("failed", "its process gave no result (killed by signal 6)")
    assert "the library's last words" in found.figures["log"]


def test_no_check_starts_once_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "ONE_CHECK", "no.such.module")
    (found,) = run.results([Check("late", nothing)], 1.0)
    assert (found.status, found.text) == ("skipped", "the 1 s of all checks are over")


def test_one_json_line_a_check_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--only", "facts", "--out", str(tmp_path / "lines")]) == 0
    (line,) = (tmp_path / "lines").read_text().splitlines()
    record = json.loads(line)
    assert list(record) == ["name", "status", "seconds", "figures", "text"]
    assert (record["name"], record["status"]) == ("facts", "ok")
    assert record["figures"]["cores"] == len(os.sched_getaffinity(0))
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == line
    assert printed[-1] == "1 ok, 0 failed, 0 skipped"
    assert run.main(["--only", "no-such-check"]) == 2


def test_a_failed_check_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Result("facts", "failed", 1.0, {}, "wrong")
    monkeypatch.setattr(run, "results", lambda checks, budget_s: iter([failed]))
    assert run.main([]) == 1
    assert "facts  failed       1.0 s  wrong" in run.summary([failed])


def test_all_deadlines_are_within_what_a_kit_may_take() -> None:
    assert run.BUDGET_S < 600
    assert all(check.deadline_s <= 120 for check in CHECKS)
    assert len({check.name for check in CHECKS}) == len(CHECKS)


@no_driver
def test_each_check_of_a_gpu_is_skipped_without_a_driver(tmp_path: Path) -> None:
    skipped = {"status": "skipped", "figures": {}, "text": "no NVIDIA driver here"}
    gpu = [check for check in CHECKS if check.gpu]
    assert len(gpu) >= 8
    assert [one.answer_of(check, tmp_path) for check in gpu] == [skipped] * len(gpu)


def test_what_a_check_raises_is_its_answer(tmp_path: Path) -> None:
    def raising(error: Exception) -> dict[str, Any]:
        def body(folder: Path) -> Figures:
            raise error

        return one.answer_of(Check("any", body, gpu=False), tmp_path)

    assert raising(SkippedError("not here")) == {"status": "skipped", "figures": {}, "text": "not here"}
    wrong = raising(CheckFailedError("wrong", {"seen": 1}))
    assert wrong == {"status": "failed", "figures": {"seen": 1}, "text": "wrong"}
    assert raising(ZeroDivisionError("by zero"))["text"] == "ZeroDivisionError: by zero"


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_each_check_of_nixl_ran_on_a_real_gpu(gpu: str) -> None:
    """Bytes compared both ways; over TCP alone NIXL refuses GPU memory."""
    recorded, later = (
        [json.loads(line) for line in (RECORDED / f"gpu/{name}.jsonl").read_text().splitlines()]
        for name in (gpu, "h200-nccl")
    )
    assert [row["name"] for row in recorded] == [check.name for check in CHECKS if check.name != "nccl_tcp"]
    assert "nccl_tcp" in {row["name"] for row in later}
    assert {row["status"] for row in (*recorded, *later)} == {"ok"}
    figures = {row["name"]: row["figures"] for row in recorded}
    assert figures["nixl_gpu_ipc"]["write transport"] == "ucx:cuda_ipc/cuda"
    assert figures["nixl_gpu_tcp"]["write transport"] == "ucx:tcp/lo"
    refusal = json.dumps(figures["nixl_gpu_tcp_refused"])
    assert any(reason in refusal for reason in TCP_REFUSALS)


# --- with a fake GPU


def answer(name: str, folder: Path, env: dict[str, str]) -> dict[str, Any]:
    """What one check says in a process of its own with this environment."""
    words = [sys.executable, "-m", "tools.gpu.one", name, str(folder / "result.json"), str(folder)]
    subprocess.run(words, cwd=ROOT, env={**os.environ, **env}, check=True, timeout=100, capture_output=True)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


@no_driver
def test_the_gpu_buffer_is_written_read_and_compared(tmp_path: Path) -> None:
    found = answer("cuda_memory", tmp_path, fake_cuda(tmp_path))
    assert found["status"] == "ok", found
    assert (found["figures"]["cuInit"], found["figures"]["cuDeviceGetCount"]) == (0, 1)
    assert found["figures"]["cuDriverGetVersion"] == 13000
    assert copied(tmp_path)["HtoD"] >= 64 << 20


@no_driver
@pytest.mark.native
def test_nixl_refuses_memory_that_ucx_does_not_know_as_the_gpus(tmp_path: Path) -> None:
    if problem := transfer.check("nixl"):
        pytest.skip(problem.reason)
    env = fake_cuda(tmp_path)
    refused = answer("nixl_gpu_tcp_refused", tmp_path, env)
    assert refused["status"] == "ok", refused
    assert "detected as host" in json.dumps(refused["figures"])
    # And where it must go, the same refusal is a failure, with the library's words.
    failed = answer("nixl_gpu_ipc", tmp_path, env)
    assert failed["status"] == "failed"


def test_wrong_bytes_are_a_failure(tmp_path: Path) -> None:
    """Over plain TCP between two fake GPUs: what arrives is compared, and moved both ways."""
    code = (
        "import json, sys; from pathlib import Path; from tools.gpu.checks import moved\n"
        "print(json.dumps(dict(moved('tcp', 'cuda', Path(sys.argv[1])))))"
    )
    env = {**os.environ, **fake_cuda(tmp_path)}
    words = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, env=env, check=True, timeout=100, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["write transport"].startswith("tcp")
    assert all(found[name] > 0 for name in ("write GB/s", "read GB/s", "read shuffled GB/s"))


def test_nvml_is_asked_call_by_call(tmp_path: Path) -> None:
    source = tmp_path / "nvml.c"
    source.write_text(
        "#include <string.h>\n"
        "int nvmlInit_v2(void) { return 0; }\n"
        'int nvmlSystemGetDriverVersion(char *to, unsigned n) { strncpy(to, "580.1", n); return 0; }\n'
        "int nvmlDeviceGetCount_v2(unsigned *n) { *n = 1; return 0; }\n"
        "int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = (void *)8; return i ? 6 : 0; }\n"
        "int nvmlDeviceGetPowerUsage(void *h, unsigned *mw) { *mw = 90000; return h ? 0 : 2; }\n"
        "int nvmlDeviceGetViolationStatus(void *h, int p, void *to) { return 3; }\n"
    )
    library = tmp_path / "libnvml-fake.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    codes = driver.nvml_codes(str(library))
    assert codes["nvmlSystemGetDriverVersion"] == "580.1"
    assert (codes["nvmlDeviceGetCount_v2"], codes["nvmlDeviceGetPowerUsage"]) == (1, 90000)
    assert codes["nvmlDeviceGetViolationStatus(0)"] == "code 3"
    assert codes["nvmlDeviceGetNvLinkState(1)"] == "not in this library"
    with pytest.raises(CheckFailedError, match="does not load"):
        driver.nvml_codes("libno-such-nvml.so")


def test_the_noise_of_bf16_needs_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SkippedError, match="torch is not installed"):
        checks.noise()


# --- the archive


def test_a_wheel_is_pruned_of_what_no_check_loads(tmp_path: Path) -> None:
    kept = {
        "nixl_cu13/_bindings.so",
        "nixl_cu13.libs/nixl/libplugin_UCX.so",
        "nixl_cu13.libs/libucp-1.so",
        "mooncake/engine.so",
        "mooncake/libetcd_wrapper.so",
    }
    dropped = {
        "nixl_ep_cu13/ep.so",
        "nixl_cu13.libs/nixl/libplugin_GPUNETIO.so",
        "nixl_cu13.libs/libaws-c-s3.so",
        "mooncake/_store.cpython-312.so",
        "mooncake/mooncake_master",
    }
    with ZipFile(tmp_path / "any.whl", "w") as wheel:
        for name in kept | dropped:
            wheel.writestr(name, "x")
    kit.unpack(tmp_path / "any.whl", tmp_path / "out")
    found = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert found == kept


def test_an_archive_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kit"
    folder.mkdir()
    (folder / "file").write_bytes(os.urandom(5000))
    assert kit.archive(folder, tmp_path / "out" / "kit.tar.gz") > 5000
    monkeypatch.setattr(kit, "LIMIT_BYTES", 4000)
    with pytest.raises(kit.KitError, match="more than"):
        kit.archive(folder, tmp_path / "out" / "kit.tar.gz")


def test_the_archive_and_its_parts_are_not_gits() -> None:
    words = ["git", "check-ignore", "dist/gpu-kit.tar.gz", "build/gpu-kit"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=30)
    if done.returncode == 128:
        pytest.skip("no git checkout")
    assert done.stdout.split() == words[2:]


def test_only_what_the_machine_lacks_is_taken_out_of_the_kit(tmp_path: Path) -> None:
    for name in ("site/pydantic", "site/no_such_package", "native"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("libc.so.6", "libno-such.so.1"):
        (tmp_path / "native" / name).write_bytes(b"")
    env = start.environment(tmp_path)
    paths = env["PYTHONPATH"].split(os.pathsep)
    assert paths[:2] == [str(tmp_path), str(tmp_path / "site" / "no_such_package")]
    assert str(tmp_path / "site" / "pydantic") not in paths
    assert env["LD_LIBRARY_PATH"].split(os.pathsep)[0] == str(tmp_path / "native-used")
    assert [path.name for path in (tmp_path / "native-used").iterdir()] == ["libno-such.so.1"]
