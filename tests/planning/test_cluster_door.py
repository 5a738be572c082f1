"""The way in on a cluster: `plan` and `doctor` take what `init` writes, and look where it runs."""

import json
import resource
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from commands import invoke
from emulated import running, spec

from kvbench.errors import EXIT_BAD_INPUT, EXIT_FAILED, InputError
from kvbench.planning.init_elsewhere import Elsewhere, address_of
from kvbench.planning.obstacles import left_out, obstacles, open_files_needed
from kvbench.planning.plan import plan_of
from kvbench.planning.scenario_files import bundled_names, load_scenario

H200 = [name for name in bundled_names() if name.startswith("qwen3-30b-a3b-h200")]


@pytest.mark.parametrize(
    ("options", "launcher", "decodes"),
    [
        (("--hosts", "node1.invalid,node2.invalid"), "ssh", 1),
        (("--hosts", "a.invalid,b.invalid,c.invalid"), "ssh", 2),
        (("--slurm",), "slurm", 1),
        (("--ray",), "ray", 1),
    ],
)
def test_what_init_writes_for_a_cluster_is_planned(
    tmp_path: Path, options: tuple[str, ...], launcher: str, decodes: int
) -> None:
    file = tmp_path / "cluster.yaml"
    done = invoke("init", str(file), "--yes", *options).succeeded()
    assert (f"next:\n  kvbench hosts install {file}\n" in done.out) == (launcher == "ssh")
    scenario, _ = load_scenario(str(file))
    assert (scenario.deployment.launcher, scenario.deployment.engine) == (launcher, "vllm")
    assert scenario.deployment.decode.instances == decodes
    done = invoke("plan", str(file), env={"PATH": str(tmp_path)})
    begins = {
        "ssh": "cannot start: host ",
        "slurm": "cannot start: Slurm's salloc, srun, ",
        "ray": "scenario" if find_spec("ray") else "cannot start: Ray is not installed here",
    }
    assert done.out.startswith(begins[launcher]), done.text
    assert done.status == (2 if "cannot start" in begins[launcher] else 0)
    assert "not included: " in done.out
    assert "SCENARIO" not in done.out
    if launcher != "ray":
        swept = invoke("sweep", str(file), "--output", str(tmp_path / "runs"), env={"PATH": str(tmp_path)})
        assert swept.status == 1
        assert "kvbench: cannot start: " in swept.err
        assert not (tmp_path / "runs").exists()


def test_doctor_says_nothing_of_this_machine_where_nothing_runs_on_it(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    invoke("init", str(file), "--yes", "--hosts", "node1.invalid,node2.invalid")
    done = invoke("doctor", str(file)).failed(1)
    assert "node1.invalid" in done.out
    for here in ("unknown command 'vllm'", "open files", "shared memory", "does not exist"):
        assert here not in done.out
    invoke("init", str(file), "--yes", "--force", "--slurm")
    done = invoke("doctor", str(file))
    assert "launcher slurm" in done.out
    assert "vllm'" not in done.out


def test_a_server_that_is_up_is_written_planned_and_examined(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    with running(tmp_path, spec()) as engine:
        invoke("init", str(file), "--yes", "--base-url", f"{engine.url}/v1/").succeeded()
        done = invoke("plan", str(file))
        assert f"tiny at {engine.url}" in done.out, done.text
        done = invoke("doctor", str(file))
        assert f"{engine.url} serves tiny" in " ".join(done.out.split()), done.text
        assert "connector nixl" not in done.out
    done = invoke("doctor", str(file)).failed(1)
    assert "nothing listens" in " ".join(done.out.split())
    assert invoke("init", str(tmp_path / "x.yaml"), "--yes", "--base-url", engine.url).status != 0


def test_one_place_is_asked_for_at_a_time() -> None:
    with pytest.raises(InputError, match="exclude each other"):
        Elsewhere.create("a,b", True, False, None, "")
    with pytest.raises(InputError, match="comma-separated names"):
        Elsewhere.create(" , ", False, False, None, "")
    with pytest.raises(InputError, match="--base-url"):
        Elsewhere.create(None, False, False, "ftp://x", "")
    assert not Elsewhere.create(None, False, False, None, "")


def test_a_host_that_is_loopback_here_keeps_its_name() -> None:
    assert address_of("me@localhost") == "localhost"
    assert address_of("nosuch.invalid") == "nosuch.invalid"


@pytest.mark.parametrize("name", H200)
def test_the_h200_scenarios_run_on_two_hosts_to_fill_in(name: str) -> None:
    scenario, _ = load_scenario(name)
    assert scenario.deployment.launcher == "ssh"
    assert set(scenario.deployment.used_hosts) == {"p", "d"}
    assert "Printed only" not in (Path(__file__).parents[2] / f"scenarios/{name}.yaml").read_text()
    assert not left_out(scenario, plan_of(scenario)), "nothing of this machine is asked"


def test_one_scenario_compares_all_on_equal_gpus() -> None:
    scenario, _ = load_scenario("qwen3-30b-a3b-h200")
    gpus = {}
    for planned in plan_of(scenario).deployments:
        deployed = scenario.deployed(planned.label)
        assert {deployed.host_name(instance.name) for instance in planned.instances} == {"p", "d"}
        gpus[planned.label] = sum(deployed.ranks_of(instance.name).gpus for instance in planned.instances)
    names = ("aggregated", "nixl", "mooncake")
    assert gpus == {f"{name}-tp{size}": 2 * size for name in names for size in (4, 8)}
    nixl, mooncake = (scenario.deployed(f"{name}-tp8") for name in names[1:])
    assert nixl.hosts == mooncake.hosts
    assert mooncake.hosts["p"].nics == scenario.connector_options("mooncake-tp8").requested_nics


def test_a_port_that_is_taken_is_said_before_anything_else() -> None:
    scenario, _ = load_scenario("quickstart", ["deployment.base_port=27640"])
    with socket.create_server(("127.0.0.1", 27642)):
        (problem,) = obstacles(scenario, plan_of(scenario), "quickstart")
    assert "ports in use: 27642" in problem.reason
    assert "deployment.base_port=0" in problem.fix


def test_the_time_of_what_is_left_out_is_not_counted() -> None:
    whole = invoke("plan", "quickstart", "--connector", "aggregated").out
    done = invoke("plan", "quickstart", "--connector", "aggregated", "--connector", "lmcache")
    assert done.out.startswith("left out: lmcache: "), done.text

    def time_of(text: str) -> str:
        (line,) = [line for line in text.splitlines() if line.startswith("estimated time")]
        return line

    assert time_of(done.out) == f"{time_of(whole)}, without lmcache"
    document = json.loads(
        invoke("plan", "quickstart", "--connector", "aggregated", "--connector", "lmcache", "--json").out
    )
    assert set(document["left_out"]) == {"lmcache"}
    assert document["obstacles"] == []


def test_the_busiest_process_has_each_stream_on_both_sides() -> None:
    scenario, _ = load_scenario("quickstart")
    assert open_files_needed(scenario) == 2 * 64 + 64
    assert open_files_needed(scenario, concurrency=700) == 2 * 700 + 64
    rate = 1000 / scenario.allowed_s
    assert 2 * 1000 + 64 <= open_files_needed(scenario, rate) <= 2 * 1001 + 64


def test_a_hard_limit_that_is_too_low_is_refused_before_the_start(tmp_path: Path) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    command = [sys.executable, "-m", "kvbench"]
    for words, status in (
        (("sweep", "quickstart", "--connector", "tcp", "--output", str(tmp_path / "runs")), EXIT_FAILED),
        (("plan", "quickstart", "--connector", "tcp"), EXIT_BAD_INPUT),
    ):
        done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=120, preexec_fn=few)
        text = " ".join((done.stdout + done.stderr).split())
        assert done.returncode == status, text
        assert "may open 64 files and sockets (ulimit -Hn), the planned load needs 192" in text
    assert not (tmp_path / "runs").exists()
