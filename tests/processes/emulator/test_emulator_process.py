"""The emulated engine as a process: start, exit codes, signals, children, memory."""

import os
import resource
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest
from emulated import free_port, launch, pair_specs, running, spec, wait_ready
from processes import lives


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_its_child(tmp_path: Path, number: signal.Signals) -> None:
    prefill, _, env = pair_specs("tcp")
    engine = launch(tmp_path, prefill, env)
    try:
        wait_ready(engine)
        children = engine.children()
        assert len(children) == 1
        body = {"prompt": [1] * 100, "max_tokens": 3900, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", engine.url + "/v1/completions", json=body, timeout=30) as reply:
            lines = reply.iter_lines()
            next(lines)
            assert engine.stop(number) == 0
            assert any('"error"' in line for line in lines)
        assert not any(lives(pid) for pid in children)
        assert "Traceback" not in engine.log.read_text()
    finally:
        engine.stop()


def test_an_engine_may_open_as_many_files_as_the_hard_limit_allows(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(200, soft), hard))  # what it inherits
    try:
        with running(tmp_path, spec()) as engine:
            assert resource.prlimit(engine.process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_signal_while_it_starts(tmp_path: Path) -> None:
    prefill, _, env = pair_specs("tcp")
    engine = launch(tmp_path, prefill, env)
    end = time.monotonic() + 20
    while not engine.log.exists() or "http" not in "".join(open_sockets(engine.process.pid)):
        assert time.monotonic() < end
        if engine.process.poll() is not None:
            break
        time.sleep(0.01)
    assert engine.stop() in (0, -signal.SIGTERM)


def open_sockets(pid: int) -> list[str]:
    """Something to wait for: "http" once the process listens."""
    try:
        listening = [c for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return ["http"]
    return ["http"] if listening else []


def test_it_stays_small_and_leaves_nothing_in_shared_memory(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    with running(tmp_path, spec(num_blocks=2048)) as engine:
        for seed in range(3):
            engine.tokens([seed + 1] * 3000, 4)
        status = Path(f"/proc/{engine.process.pid}/status").read_text()
        sizes = {
            line.split()[0]: int(line.split()[1]) for line in status.splitlines() if line.startswith("Rss")
        }
        assert sizes["RssAnon:"] + sizes["RssFile:"] < 150 * 1024  # kB, beside the pool (RssShmem)
        assert set(os.listdir("/dev/shm")) <= before
        loaded = Path(f"/proc/{engine.process.pid}/maps").read_text()
        assert not any(name in loaded for name in ("pandas", "pyarrow", "matplotlib", "torch", "mooncake"))


def test_a_dead_transfer_process_is_told(tmp_path: Path) -> None:
    prefill, decode, env = pair_specs("tcp", transfer_timeout_s=2.0)
    with running(tmp_path, prefill, decode, env=env) as (p, d):
        for child in d.children():
            os.kill(child, signal.SIGKILL)
        body = {"prompt": [1] * 20, "max_tokens": 1}
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        answer = p.post("/v1/completions", {**body, "kv_transfer_params": params}).json()
        body["kv_transfer_params"] = answer["kv_transfer_params"]
        d.refused(body, 500, "the transfer process has ended")


def test_a_side_channel_of_another_engine_is_refused(tmp_path: Path) -> None:
    prefill, decode, env = pair_specs("tcp", transfer_timeout_s=2.0)
    with running(tmp_path, prefill, decode, env=env) as (p, d):
        body = {"prompt": [1] * 20, "max_tokens": 1}
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        answer = p.post("/v1/completions", {**body, "kv_transfer_params": params}).json()[
            "kv_transfer_params"
        ]
        for changes, message in (
            ({"remote_engine_id": "other"}, "is engine engine-p"),
            ({"remote_port": free_port()}, "no connection to"),
        ):
            d.refused({**body, "kv_transfer_params": {**answer, **changes}}, 500, message)
        for changes, message in (
            ({"remote_block_ids": [[1]]}, "names 1 blocks, the prompt has 2"),
            ({"remote_num_tokens": 21}, "P computed 21 prompt tokens and D got 20"),
            ({"remote_block_ids": "x"}, "list of lists"),
        ):
            d.refused({**body, "kv_transfer_params": {**answer, **changes}}, 400, message)
