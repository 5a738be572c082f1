"""What kvbench's servers have in common as processes: refusals of a spec or port, and their parent's end."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from commands import wait_until
from emulated import free_port, pair_specs, spec
from processes import still_living

HOST = "127.0.0.1"
ROUTER = {"port": 0, "connector": "aggregated", "decode": [{"url": f"http://{HOST}:1"}]}
REFUSED: list[tuple[str, dict[str, Any] | str, str]] = [
    ("router", {**ROUTER, "connectr": "nixl"}, "did you mean 'connector'"),
    ("router", {**ROUTER, "connector": "nope"}, "no connector is called 'nope'"),
    ("router", {**ROUTER, "decode": []}, "at least one decode"),
    ("router", {**ROUTER, "connector": "nixl"}, "at least one prefill"),
    ("router", {**ROUTER, "connector": "mooncake", "prefill": [{"url": "http://x:1"}]}, "bootstrap_url"),
    ("router", {**ROUTER, "decode": [{"ulr": "http://x:1"}]}, "did you mean 'url'"),
    ("router", {**ROUTER, "decode": [{"url": "x"}]}, "not an http://"),
    ("router", {**ROUTER, "port": "high"}, "'port'"),
    ("exact_server", {"prot": 1}, "did you mean 'port'?"),
    ("exact_server", {"queue": "mm1"}, "queue 'mm1' is unknown"),
    ("exact_server", {"queue": "md1"}, "queue md1 needs service_s"),
    ("exact_server", {"gap_s": -1}, "gap_s must be 0 or more"),
    ("exact_server", {"output_len": 0}, "output_len must be at least 1"),
    ("exact_server", {"port": 70_000}, "port must be 0 to 65535"),
    ("exact_server", {"trouble": {"kind": "rest"}}, "trouble 'rest' is unknown"),
    ("exact_server", {"trouble": {"kind": "reset", "every": 0}}, "trouble.every must be at least 1"),
    ("exact_server", {"trouble": {}, "host": "256.1.1.1"}, "cannot listen on 256.1.1.1:0"),
    ("emulator", spec(prot=1), "prot: Extra inputs are not permitted"),
    ("emulator", "{", ""),
]


def command(name: str, path: Path) -> list[str]:
    return [sys.executable, "-m", f"kvbench.processes.{name}", str(path)]


def run(name: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(name, path), capture_output=True, text=True, timeout=30)


def written(folder: Path, content: dict[str, Any] | str) -> Path:
    path = folder / "spec.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("name", "content", "text"), REFUSED, ids=[f"{name}: {text or 'no JSON'}" for name, _, text in REFUSED]
)
def test_a_bad_spec_is_exit_code_2(
    tmp_path: Path, name: str, content: dict[str, Any] | str, text: str
) -> None:
    done = run(name, written(tmp_path, content))
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_a_spec_that_is_not_there_is_exit_code_2(tmp_path: Path) -> None:
    assert run("emulator", tmp_path / "no.json").returncode == 2


@pytest.mark.parametrize(
    ("name", "content", "key"),
    [
        ("router", ROUTER.copy, "port"),
        ("exact_server", dict, "port"),
        ("emulator", spec, "port"),
        ("emulator", lambda: pair_specs("tcp")[0], "side_channel_port"),
    ],
    ids=["router", "exact_server", "emulator", "side channel of an emulator"],
)
def test_a_busy_port_is_exit_code_98(tmp_path: Path, name: str, content: Any, key: str) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        done = run(name, written(tmp_path, {**content(), key: port}))
    assert done.returncode == 98, done.stderr
    assert f"port {HOST}:{port} is in use" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["router", "exact_server", "emulator"])
def test_a_server_ends_with_its_parent(tmp_path: Path, name: str) -> None:
    pair, port = pair_specs("tcp")[0], free_port()
    path = written(tmp_path, {**{"router": ROUTER, "exact_server": {}, "emulator": pair}[name], "port": port})
    starter = (
        "import subprocess, sys, time\n"
        "print(subprocess.Popen(sys.argv[1:], stdout=-3).pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    words = [sys.executable, "-c", starter, *command(name, path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        server = psutil.Process(int(parent.stdout.readline()))

        def up() -> bool:
            try:  # the router's only backend is not there
                health = httpx.get(f"http://{HOST}:{port}/health")
            except httpx.TransportError:
                return False
            return health.status_code == (503 if name == "router" else 200)

        try:
            wait_until(up, 30)
            family = [server, *server.children()]
        finally:
            parent.kill()
    assert not still_living(family)
