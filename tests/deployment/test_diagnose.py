"""Log lines and their causes: each pattern on a line as it is written, honest logs, live watching."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import invoke
from emulated import running_pair
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench import connectors, transfer
from kvbench.core.plan.processes import ProcessSpec
from kvbench.deployment.diagnose import LogSource, LogWatch, diagnose, patterns, worst
from kvbench.deployment.liveness import ProcessWatch, beside
from kvbench.errors import LaunchError, ProcessDiedError
from kvbench.hosts.log_tail import MAX_BEHIND_BYTES, MAX_LINE_BYTES, LogReader
from kvbench.launchers.local import LocalLauncher

# Key of its pattern, or "-" for an honest line, a tab, and the line.
_ROWS = [
    row.split("\t", 1)
    for row in Path(__file__).with_name("log_lines.txt").read_text("utf-8").splitlines()
    if not row.startswith("#")
]
LINES = {key: line for key, line in _ROWS if key != "-"}
HONEST = [line for key, line in _ROWS if key == "-"]
MOONCAKE = LogSource("prefill-0", "vllm", "MooncakeConnector", "prefill", "tcp")
NIXL = LogSource("decode-0", "vllm", "NixlConnector", "decode", "tcp")


def test_every_pattern_has_a_line() -> None:
    assert set(LINES) == set(patterns())
    assert len(patterns()) == len(LINES)


@pytest.mark.parametrize("key", LINES)
def test_each_line_is_told_its_cause(key: str) -> None:
    (found,) = diagnose([LINES[key]], LogSource(requested_transport="rdma"))
    assert found.key == key
    assert found.cause
    assert found.hint
    assert found.line in LINES[key]
    assert found.cause in found.text()


@given(st.permutations(HONEST), st.sampled_from([LogSource(), MOONCAKE, NIXL]))
def test_honest_lines_tell_nothing(lines: list[str], source: LogSource) -> None:
    honest = [line for line in lines if "using TCP" not in line or source.requested_transport == "tcp"]
    assert diagnose(honest, source) == []


@given(st.permutations([*HONEST[:8], LINES["engine_failed_to_start"], LINES["no_room_for_kv"]]))
def test_the_root_comes_before_its_consequence(lines: list[str]) -> None:
    source = LogSource("decode-0", "vllm", "NixlConnector", "decode", "tcp")
    found = worst(diagnose(lines, source))
    assert found.key == "no_room_for_kv"


def test_a_pattern_is_looked_for_only_where_it_belongs() -> None:
    race = [LINES["reqs_need_send_race"]]
    assert diagnose(race, MOONCAKE)
    assert not diagnose(race, LogSource("decode-0", "vllm", "MooncakeConnector", "decode"))
    assert not diagnose(race, NIXL)
    silent = [LINES["mooncake_silent_tcp"]]
    assert not diagnose(silent, MOONCAKE)
    assert diagnose(silent, LogSource("prefill-0", "vllm", "MooncakeConnector", "prefill", "rdma"))
    assert diagnose(race, LogSource("prefill-0", "vllm", "MultiConnector", "prefill"))
    assert not diagnose([LINES["model_not_found"]], LogSource("prefill-0", "emulated", "NixlConnector"))


def test_some_are_fatal_only_when_they_come_again_and_again() -> None:
    line = LINES["qp_rtr"]
    (once,) = diagnose([line] * 7, MOONCAKE)
    assert (once.level, once.count) == ("warning", 7)
    (often,) = diagnose([line] * 8, MOONCAKE)
    assert often.fatal


def test_a_death_is_one_death_however_many_requests_speak_of_it(tmp_path: Path) -> None:
    line, source = LINES["transfer_process"], LogSource("decode-0", "emulated")
    (found,) = diagnose([line] * 7, source)
    assert (found.count, found.fatal) == (1, True)
    assert "times" not in found.text()
    path, watch = tmp_path / "d.log", LogWatch()
    watch.follow(path, source)
    for _ in range(2):
        with path.open("a") as file:
            file.write(f"{line}\n" * 3)
        watch.poll()
    (found,) = watch.take()
    assert found.count == 1


def test_as_findings() -> None:
    def level(key: str, *, excused: bool) -> str:
        return diagnose([LINES[key]])[0].finding(excused=excused).level

    assert level("stale_kv", excused=False) == level("stale_kv", excused=True) == "invalid"
    assert level("nixl_transfer", excused=False) == "invalid"
    assert level("nixl_transfer", excused=True) == "warning"
    assert level("kv_expired", excused=False) == "warning"
    assert level("kv_expired", excused=True) == "note"


class TestCommand:
    """`kvbench doctor diagnose` on logs that somebody brings."""

    def test_it_says_what_where_and_what_to_do(self, tmp_path: Path) -> None:
        log = tmp_path / "decode.log"
        log.write_text("\n".join([*HONEST[:3], LINES["nixl_vram_as_host"], LINES["kv_expired"]]) + "\n")
        done = invoke("diagnose", str(log)).failed(1)
        assert f"fatal {log}:4: UCX may not use CUDA" in done.out
        assert f"warning {log}:5" in done.out
        assert "hint  leave UCX_TLS out" in done.out
        assert LINES["nixl_vram_as_host"][:60] in done.out

    def test_a_folder(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "p.log").write_text(f"{LINES['kv_expired']}\n" * 3)
        (tmp_path / "a" / "notes.txt").write_text(LINES["engine_dead"])
        invoke("diagnose", str(tmp_path)).succeeded(f"{tmp_path}/a/p.log:1, 3 times")

    def test_some_lines_mean_trouble_only_for_what_was_asked(self, tmp_path: Path) -> None:
        (tmp_path / "p.log").write_text(LINES["mooncake_silent_tcp"] + "\n")
        assert "no log pattern matches" in invoke("diagnose", str(tmp_path / "p.log")).out
        assert invoke("diagnose", str(tmp_path / "p.log"), "--protocol", "rdma").status == 1

    def test_what_cannot_be_read(self, tmp_path: Path) -> None:
        done = invoke("diagnose", str(tmp_path / "none.log"))
        assert (done.status, "cannot be read" in done.err) == (2, True)
        assert "holds no *.log" in invoke("diagnose", str(tmp_path)).err


def test_it_reads_stdin() -> None:
    words = [sys.executable, "-m", "kvbench.cli", "diagnose"]
    long = b"x" * 3_000_000 + LINES["engine_dead"].encode() + b"\n" + LINES["no_device"].encode()
    piped = subprocess.run(words, input=long, capture_output=True, timeout=60, check=False)
    assert piped.returncode == 1
    assert b"stdin:2: vLLM finds no device" in piped.stdout
    assert b"died" not in piped.stdout  # far behind the beginning of a line that is too long to be one


class TestReader:
    @settings(max_examples=60)
    @given(
        st.lists(
            st.text(
                st.characters(codec="utf-8", exclude_characters="\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"),
                max_size=30,
            )
        ),
        st.lists(st.integers(1, 40)),
    )
    def test_lines_are_whole_however_they_are_written(self, lines: list[str], cuts: list[int]) -> None:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "x.log"
            reader = LogReader(path)
            data = "".join(f"{line}\n" for line in lines).encode()
            seen: list[str] = []
            with path.open("ab", buffering=0) as file:
                for cut in [*cuts, len(data)]:
                    file.write(data[:cut])
                    data = data[cut:]
                    seen += reader.read(7)
                seen += reader.drain()
            assert seen == [line.rstrip() for line in lines if line.rstrip()]

    def test_what_was_there_before_is_left(self, tmp_path: Path) -> None:
        path = tmp_path / "x.log"
        path.write_text("old\n")
        reader = LogReader(path)
        with path.open("a") as file:
            file.write("new\n")
        assert reader.drain() == ["new"]
        assert LogReader(path, from_start=True).drain() == ["old", "new"]

    def test_an_endless_line_is_cut_and_the_next_one_is_whole(self, tmp_path: Path) -> None:
        path = tmp_path / "x.log"
        reader = LogReader(path)
        path.write_text("x" * 300_000 + "\nnext\n")
        lines = reader.drain()
        assert lines[-1] == "next"
        assert max(map(len, lines)) <= MAX_LINE_BYTES
        assert len(lines) == 2

    def test_a_flood_is_skipped_to_its_end(self, tmp_path: Path) -> None:
        path = tmp_path / "x.log"
        reader = LogReader(path)
        path.write_text("".join(f"line {number}\n" for number in range(MAX_BEHIND_BYTES // 10)))
        lines = reader.drain()
        assert lines[-1] == f"line {MAX_BEHIND_BYTES // 10 - 1}"
        assert all(line.startswith("line ") for line in lines)
        assert sum(map(len, lines)) <= MAX_BEHIND_BYTES // 4

    def test_a_file_that_begins_anew(self, tmp_path: Path) -> None:
        path = tmp_path / "x.log"
        path.write_text("a long first life\n")
        reader = LogReader(path)
        path.write_text("second\n")
        assert reader.drain() == ["second"]


def test_a_watch_keeps_what_it_found_until_it_is_taken(tmp_path: Path) -> None:
    path, watch = tmp_path / "p.log", LogWatch()
    watch.follow(path, MOONCAKE)
    assert watch.poll() is None
    for line in (HONEST[2], LINES["qp_rtr"], LINES["qp_rtr"]):
        with path.open("a") as file:
            file.write(line + "\n")
        assert watch.poll() is None
    (found,) = watch.take()
    assert (found.key, found.count, found.process) == ("qp_rtr", 2, "prefill-0")
    assert watch.take() == []
    with path.open("a") as file:
        file.write((LINES["qp_rtr"] + "\n") * 5)
        file.flush()
        assert watch.poll() is None
        file.write((LINES["qp_rtr"] + "\n") * 3)
    assert watch.poll().count == 8


@pytest.fixture
def launcher(tmp_path: Path) -> LocalLauncher:
    return LocalLauncher("test-diagnose", tmp_path / "logs", tmp_path / "specs")


class TestProcesses:
    """A watch over real processes that say what vLLM says."""

    def watched(self, launcher: LocalLauncher, code: str) -> Iterator[ProcessWatch]:
        watch = ProcessWatch("vllm", connectors.get("mooncake"), "tcp")
        spec = ProcessSpec("prefill-0", (sys.executable, "-c", code))
        watch.follow(spec, launcher.log_path(spec))
        process = launcher.start(spec)
        try:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                watch.check([process])
                time.sleep(0.02)
            yield watch
        finally:
            launcher.stop([process])

    def test_a_fatal_line_ends_the_wait_although_the_process_lives(self, launcher: LocalLauncher) -> None:
        code = (
            "import time; print('EngineCore failed to start.', flush=True); time.sleep(0.1); "
            "print('ValueError: No available memory for the cache blocks.', flush=True); time.sleep(60)"
        )
        with pytest.raises(LaunchError, match="too little memory for the KV cache") as caught:
            next(self.watched(launcher, code))
        assert not isinstance(caught.value, ProcessDiedError)
        assert "max_model_len" in caught.value.hint
        assert "prefill-0.log" in caught.value.hint

    def test_a_death_is_explained(self, launcher: LocalLauncher) -> None:
        code = "import sys; sys.exit('ImportError: libibverbs.so.1: cannot open shared object file')"
        with pytest.raises(
            ProcessDiedError, match="ended with status 1: a shared library is missing"
        ) as caught:
            next(self.watched(launcher, code))
        assert "libibverbs1" in caught.value.hint
        assert "libibverbs.so.1" in caught.value.message

    def test_a_death_without_a_word(self, launcher: LocalLauncher) -> None:
        with pytest.raises(ProcessDiedError, match=r"prefill-0 ended with status 7 \(the whole log is"):
            next(self.watched(launcher, "import os; os._exit(7)"))


def test_a_call_is_left_when_the_check_raises() -> None:
    assert beside(lambda: 3, lambda: None) == 3
    with pytest.raises(KeyError):
        beside(lambda: {}["x"], lambda: None)
    began, checks = time.monotonic(), 0

    def check() -> None:
        nonlocal checks
        checks += 1
        if checks == 2:
            raise LaunchError("boom")

    with pytest.raises(LaunchError, match="boom"):
        beside(lambda: time.sleep(3), check)
    assert time.monotonic() - began < 3


@pytest.mark.native
@pytest.mark.parametrize("name", ["mooncake", "nixl"])
def test_a_real_pairs_logs_tell_nothing(name: str, tmp_path: Path) -> None:
    connector = connectors.get(name)
    problem = transfer.check(connector.transfer_backend)
    if problem is not None:
        pytest.skip(problem.reason)
    with running_pair(tmp_path, name) as pair:
        for number in range(5):
            pair.tokens(list(range(number * 100, number * 100 + 64)))
    logs = sorted(tmp_path.glob("*.log"))
    assert len(logs) == 2
    for log in logs:
        lines = log.read_text(errors="replace").splitlines()
        assert len(lines) > 2
        transport = connector.requested_transport(connector.options_model())
        assert diagnose(lines, LogSource(log.stem, "emulated", connector.kv_connector, "", transport)) == []
        assert [diagnosis for diagnosis in diagnose(lines) if diagnosis.key != "mooncake_silent_tcp"] == []


# What engines and libraries are known to say when a hand-over goes wrong, and the key of its cause.
KNOWN_WORDS = {
    "Failed to modify QP to RTR, check mtu, gid, peer lid, peer qp num": "qp_rtr",
    "transport retry counter exceeded": "rdma_retry",
    "Failed to select remote NIC for address 0x7f10": "remote_nic",
    "Failed to register memory 0x7f22: Bad address [14]": "peermem",
    "Failed to register memory 0x7f22: I/O error [5]": "register_memory",
    "Failed to register memory 0x7f22: Resource temporarily unavailable [11]": "register_memory",
    "mlx5_core: CREATE_MKEY(0x200) op_mod(0x0) failed, status bad resource": "register_memory",
    "transfer_engine_impl.cpp:251] installTransport, type=tcp": "mooncake_silent_tcp",
    "zmq.error.ZMQError: Address already in use (addr='tcp://10.0.0.1:8998')": "port_in_use",
    "listen tcp :50051: bind: address already in use": "port_in_use",
    "Bootstrap server on port 8998 already in use": "port_in_use",
    "Request cmpl-1-0 not found in reqs_need_send": "reqs_need_send_race",
    "Request cmpl-1-0 timed out after 480 seconds without being sent": "kv_expired",
    "MooncakeAgentMetadata transfer failed for ['cmpl-1-0']": "metadata_transfer",
    "Got invalid KVTransferParams: {}": "wrong_router",
    "Missing transfer_id in kv_transfer_params from router!": "wrong_router",
    "D tp_rank 3 is not paired with P tp_rank 0": "tp_mismatch",
    "NIXL compatibility hash mismatch. Local: 3fc7, Remote: 1612": "nixl_mismatch",
    "NIXL agent engine ID mismatch: expected a, received b": "nixl_mismatch",
    "Handshake failed for request cmpl-1": "nixl_transfer",
    "NIXL transfer failure: handshake_setup_failed": "nixl_transfer",
    "Releasing expired KV blocks for request cmpl-1": "kv_expired",
    "blocks were not read before lease expired": "kv_expired",
    "Potentially invalid KV blocks for unrecognized request cmpl-1": "stale_kv",
    "nixl_cu12._bindings.nixlBackendError: NIXL_ERR_BACKEND": "nixl_backend",
    "NIXL_ERR_REMOTE_DISCONNECT": "nixl_backend",
    "tcp_ep.c:1043 UCX  ERROR tcp_ep 0x55: recv failed": "ucx_error",
    "UCX ERROR mlx5dv_devx_alloc_uar() failed": "uar_exhausted",
    "Recv Tensor, Out Of Memory, 10.0.0.1:21001": "nccl_out_of_memory",
    "Recv Tensor, Out Of Threshold, 10.0.0.1:21001": "nccl_out_of_memory",
    "Send Tensor, Peer Out Of Memory/Threshold": "nccl_out_of_memory",
    "_pickle.UnpicklingError: invalid load key, '\\xb0'.": "garbled_payload",
    "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue": "engine_dead",
    "Engine core proc EngineCore_DP0 died unexpectedly, shutting down client.": "engine_dead",
    "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup": "engine_dead",
    "RuntimeError: CUDA error: out of memory": "out_of_memory",
}


@pytest.mark.parametrize("words", KNOWN_WORDS)
def test_what_is_known_to_go_wrong_has_a_cause_and_a_mend(words: str) -> None:
    (found,) = diagnose([words], LogSource(requested_transport="rdma"))
    assert found.key == KNOWN_WORDS[words]
    assert found.hint
