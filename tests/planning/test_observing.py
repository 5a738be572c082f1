"""Profilers before an engine's command, and NVTX ranges in the transfer process."""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import emulated
import pytest
from commands import DEADLINE_S, argv, invoke

from kvbench.core.plan.processes import ProcessSpec
from kvbench.core.scenario.scenario import Scenario
from kvbench.planning.process_specs import has_prefix, nsys_override, observed
from kvbench.planning.scenario_files import load_scenario

# Does what nsys does with its arguments and its program: runs it, lets it end, then writes its report.
NSYS = """#!/bin/sh
[ "$1" = profile ] || exit 9
shift
while [ "${1#--}" != "$1" ]; do
    case "$1" in --output=*) out="${1#--output=}" ;; esac
    shift
done
trap 'kill -TERM $child' TERM
"$@" & child=$!
while kill -0 $child 2>/dev/null; do wait $child; done
echo report > "$out.nsys-rep"
"""


@pytest.fixture
def with_nsys(tmp_path: Path) -> dict[str, str]:
    """An environment that has such a program on its PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "nsys").write_text(NSYS)
    (folder / "nsys").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def scenario(*overrides: str) -> Scenario:
    return load_scenario("quickstart", overrides)[0]


def test_a_prefix_comes_before_its_role_only(tmp_path: Path) -> None:
    wanted = scenario('deployment.prefix={"prefill": ["taskset", "-c", "0", "x={logs}/{name}"]}').deployment
    spec = ProcessSpec("prefill-0", ("engine", "arg"), spec={})
    assert observed(spec, "prefill", wanted, tmp_path).argv == (
        *("taskset", "-c", "0", f"x={tmp_path}/prefill-0"),
        *("engine", "arg"),
    )
    assert observed(spec, "decode", wanted, tmp_path) == spec
    assert observed(spec, "", wanted, tmp_path) == spec
    assert "{logs}/prefill-0" in observed(spec, "prefill", wanted, None).argv[3]
    assert has_prefix(wanted)
    assert not has_prefix(scenario().deployment)


def test_braces_of_the_user_are_left_alone() -> None:
    wanted = scenario('deployment.prefix={"decode": ["sh", "{\'a\': {other}}"]}').deployment
    assert observed(ProcessSpec("d", ("x",)), "decode", wanted, None).argv[1] == "{'a': {other}}"


def test_tracing_reaches_only_processes_with_a_spec(tmp_path: Path) -> None:
    wanted = scenario("deployment.trace=true").deployment
    ours = observed(ProcessSpec("router", ("x",), spec={"port": 1}), "", wanted, tmp_path)
    assert ours.spec == {"port": 1, "trace_path": f"{tmp_path}/router.trace.jsonl"}
    theirs = ProcessSpec("prefill-0", ("vllm", "serve"))
    assert observed(theirs, "prefill", wanted, tmp_path) == theirs


def test_nvtx_is_on_in_vllm_under_nsys() -> None:
    words = (
        "deployment.engine=vllm",
        "deployment.engine_options={model: m, version: 0.32.0}",
        "deployment.prefix.decode=[/opt/nsys, profile]",
    )
    wanted = scenario(*words).deployment
    spec = ProcessSpec("decode-0", ("vllm", "serve"))
    assert observed(spec, "decode", wanted, None).env == {"VLLM_NVTX_SCOPES_FOR_PROFILING": "1"}
    assert observed(spec, "prefill", wanted, None).env == {}


def test_a_wrong_prefix_is_told_with_its_place() -> None:
    done = invoke("plan", "quickstart", sets=("deployment.prefix.prefill=nsys profile",)).failed(2)
    assert "deployment.prefix.prefill must be a list" in done.err


def test_without_nsys_launch_says_so(tmp_path: Path) -> None:
    done = invoke("launch", "quickstart", "--nsys", env={"PATH": str(tmp_path)}).failed(1)
    assert "nsys is not installed" in done.err


def test_the_override_is_a_prefix_for_every_role(
    with_nsys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", with_nsys["PATH"])
    prefix = scenario(nsys_override()).deployment.prefix
    assert prefix.prefill == prefix.decode == prefix.aggregated
    assert prefix.prefill[:2] == ("nsys", "profile")


def test_launch_under_a_profiler_leaves_a_report_per_instance(with_nsys: dict[str, str]) -> None:
    process = subprocess.Popen(
        argv("launch", "quickstart", "--connector", "tcp", "--nsys", sets=("deployment.base_port=0",)),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **with_nsys},
    )  # fmt: skip
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "Ctrl-C" in line:
                break
        assert any("ready after" in line for line in lines), lines
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, out
    reports = [Path(line.split()[1]) for line in out.splitlines() if line.startswith("profile:")]
    assert sorted(path.name for path in reports) == ["decode-0.nsys-rep", "prefill-0.nsys-rep"]
    assert all(path.is_file() for path in reports)


def test_transfers_are_nvtx_ranges_where_nvtx_is_installed(tmp_path: Path) -> None:
    """A package of that name on the path of real engines writes down what it is asked to mark."""
    package, seen = tmp_path / "site", tmp_path / "ranges"
    package.mkdir()
    (package / "nvtx.py").write_text(
        f"def _note(*words):\n    print(*words, file=open({str(seen)!r}, 'a'))\n"
        "def start_range(message, domain):\n    _note('start', domain, message)\n    return 5\n"
        "def end_range(number):\n    _note('end', number)\n"
    )
    prefill, decode, env = emulated.pair_specs("tcp")
    path = ":".join(filter(None, [str(package), os.environ.get("PYTHONPATH", "")]))
    with emulated.running(tmp_path, prefill, decode, env={**env, "PYTHONPATH": path}) as (p, d):
        emulated.Pair("tcp", p, d).tokens(list(range(200)))
    assert seen.read_text().splitlines() == ["start kvbench KV read, 13 blocks", "end 5"]


@pytest.mark.skipif(importlib.util.find_spec("nvtx") is not None, reason="nvtx is installed here")
def test_without_nvtx_an_endpoint_stays_as_it_is() -> None:
    code = (
        "from kvbench import transfer\nfrom kvbench.processes.transfer_worker.child import mark_ranges\n"
        "endpoint = transfer.get('null').open({})\nmark_ranges(endpoint)\nprint(vars(endpoint).keys() & "
        "{'prepare', 'start', 'poll', 'release'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "set()"
