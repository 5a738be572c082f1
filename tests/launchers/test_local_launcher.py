"""The local launcher with real processes: logs, stop order, force, orphans."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from commands import wait_until
from processes import lives

from kvbench.core.plan.processes import RUN_TAG_ENV, ProcessSpec
from kvbench.hosts.log_tail import tail_of
from kvbench.hosts.procfs import cpu_s, family, is_stopped
from kvbench.launchers.local import LocalLauncher, LocalProcess
from kvbench.launchers.parts.liveness import Heartbeat


@pytest.fixture
def launcher(tmp_path: Path) -> LocalLauncher:
    return LocalLauncher("test-tag", tmp_path / "logs", tmp_path / "specs")


def python(code: str, name: str = "worker", **fields: object) -> ProcessSpec:
    return ProcessSpec(name=name, argv=(sys.executable, "-c", code), **fields)  # type: ignore[arg-type]


def test_environment_tag_spec_file_and_log(launcher: LocalLauncher) -> None:
    code = (
        f"import os, sys; print(os.environ['{RUN_TAG_ENV}'], os.environ['EXTRA'], open(sys.argv[1]).read())"
    )
    process = launcher.start(python(code, env={"EXTRA": "word"}, spec={"a": 1}))
    wait_until(lambda: process.poll() is not None)
    assert process.poll() == 0
    text = process.log_path.read_text()
    assert text.startswith("test-tag word")
    assert json.loads(text.split("word", 1)[1]) == {"a": 1}


def test_it_is_the_command_itself_and_leads_its_own_group(launcher: LocalLauncher) -> None:
    process = launcher.start(python("import os, time; print(os.getpid(), os.getpgrp()); time.sleep(60)"))
    wait_until(lambda: bool(tail_of(process.log_path, 1)))
    assert tail_of(process.log_path, 1) == [f"{process.pid} {process.pid}"]
    launcher.stop([process])
    assert process.poll() == -signal.SIGTERM


def test_what_cannot_be_run_says_so(launcher: LocalLauncher) -> None:
    process = launcher.start(ProcessSpec("absent", ("no-such-command-here",)))
    wait_until(lambda: process.poll() is not None)
    assert process.poll() == 127
    assert "cannot run no-such-command-here" in "\n".join(process.tail())


def test_stop_goes_in_reverse_order_and_forces_what_does_not_listen(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    order = tmp_path / "order"
    polite = (
        "import signal, sys, time\n"
        "def leave(*_):\n"
        f"    open({str(order)!r}, 'a').write(sys.argv[0] + NAME)\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "print('up', flush=True)\n"
        "time.sleep(60)\n"
    )
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(60)"
    )
    processes = [
        launcher.start(python(polite.replace("NAME", "'first '"), "first")),
        launcher.start(python(stubborn, "stubborn")),
    ]
    wait_until(lambda: all(tail_of(process.log_path, 1) == ["up"] for process in processes))
    launcher.stop(processes, grace_s=1.0)
    assert [process.poll() for process in processes] == [0, -signal.SIGKILL]
    assert "first" in order.read_text()


def test_grandchildren_go_with_their_parent(launcher: LocalLauncher) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "sys.exit(0) if len(sys.argv) > 1 else time.sleep(60)\n"
    )
    process = launcher.start(python(code))
    wait_until(lambda: bool(tail_of(process.log_path, 1)))
    grandchild = int(tail_of(process.log_path, 1)[0])
    launcher.stop([process])
    wait_until(lambda: not lives(grandchild))


def test_a_piped_process_converses(launcher: LocalLauncher) -> None:
    process: LocalProcess = launcher.start(python("print(input()[::-1], flush=True)"), piped=True)
    process.stdin.write(b"abc\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"cba\n"
    launcher.stop([process])


def test_nothing_survives_a_kill_of_the_starter(tmp_path: Path) -> None:
    """Neither a server nor its children, which wait for no parent: vLLM's engine cores."""
    server = (
        "import subprocess, sys, time\n"
        "core = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'pids')!r}, 'w').write(str(core.pid) + '\\n')\n"
        "time.sleep(60)\n"
    )
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from kvbench.core.plan.processes import ProcessSpec\n"
        "from kvbench.launchers.local import LocalLauncher\n"
        f"launcher = LocalLauncher('tag', Path({str(tmp_path)!r}), Path({str(tmp_path)!r}))\n"
        f"spec = ProcessSpec('server', (sys.executable, '-c', {server!r}), one_thread=False)\n"
        "print(launcher.start(spec).pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(starter.stdout.readline())
    wait_until(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text().endswith("\n"))
    pids = [pid, int((tmp_path / "pids").read_text())]
    assert all(map(lives, pids))
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait()
    starter.stdout.close()
    wait_until(lambda: not any(map(lives, pids)))
    group = [path.parent.name for path in Path("/proc").glob("[0-9]*/stat") if in_group(path, pid)]
    assert not group  # nor the watcher


def in_group(stat: Path, group: int) -> bool:
    try:
        state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
    except OSError:
        return False
    return its_group == str(group) and state != "Z"


def test_tail_reads_only_the_end(tmp_path: Path) -> None:
    log = tmp_path / "big.log"
    log.write_text("".join(f"line {number}\n" for number in range(100_000)))
    assert tail_of(log, 2) == ["line 99998", "line 99999"]
    assert tail_of(tmp_path / "absent.log", 2) == []


def test_tail_leaves_out_what_ucx_reports_for_information(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    reported = (Path(__file__).parents[1] / "recorded" / "ucx" / "read-over-tcp.log").read_text()
    failed = "[1795390662.1] [host:25685:0]  sock.c:328 UCX  ERROR connect() failed: Connection refused"
    log.write_text(f"ready\n{reported}{failed}\n{reported}")
    assert tail_of(log, 12) == ["ready", failed]


def test_one_that_is_stopped_is_let_go_on_to_its_end(launcher: LocalLauncher) -> None:
    code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print('up'); time.sleep(60)"
    process = launcher.start(python(code))
    wait_until(lambda: bool(process.tail()))
    os.kill(process.pid, signal.SIGSTOP)
    launcher.stop([process], 20)
    assert process.poll() == 7


def test_any_answer_counts_and_a_late_one_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as well, socket.create_server(("127.0.0.1", 0)) as late:
        urls = {
            name: f"http://127.0.0.1:{sock.getsockname()[1]}/x"
            for name, sock in (("well", well), ("late", late))
        }
        with Heartbeat(urls, every_s=0.1) as heartbeat:
            held, _ = late.accept()
            with held:
                for _ in range(4):
                    connection, _ = well.accept()
                    with connection:
                        assert connection.recv(1000).startswith(b"GET /x HTTP/1.1\r\nhost: 127.0.0.1:")
                        connection.sendall(b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n")
                wait_until(lambda: heartbeat.silent_s()["late"] > 0.3)
                held.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                wait_until(lambda: heartbeat.silent_s()["late"] < 0.3)


def test_who_refuses_or_hangs_up_has_not_answered() -> None:
    with socket.create_server(("127.0.0.1", 0)) as rude:
        port = rude.getsockname()[1]
        with Heartbeat(
            {"rude": f"http://127.0.0.1:{port}", "gone": "http://127.0.0.1:9"}, every_s=0.05
        ) as heartbeat:
            for _ in range(3):
                rude.accept()[0].close()
            wait_until(lambda: min(heartbeat.silent_s().values()) > 0.2)


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(ValueError, match="not a plain http"):
        Heartbeat({"a": "https://127.0.0.1:1"})


def test_closing_twice_and_without_a_start() -> None:
    heartbeat = Heartbeat({})
    heartbeat.close()
    heartbeat.close()
    assert heartbeat.silent_s() == {}


def test_a_family_its_state_and_its_time() -> None:
    code = (
        "import subprocess, sys, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True);"
        "[None for _ in range(10**6)]; sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        child = int(process.stdout.readline())
        try:
            assert family(process.pid) == [process.pid, child]
            wait_until(lambda: cpu_s([process.pid]) > 0)
            assert not is_stopped(child)
            os.kill(child, signal.SIGSTOP)
            wait_until(lambda: is_stopped(child))
            assert not is_stopped(process.pid)
        finally:
            os.kill(child, signal.SIGKILL)
    assert cpu_s([process.pid]) == 0
    assert not is_stopped(process.pid)
