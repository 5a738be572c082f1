"""``kvbench hosts install``: what is copied and run, and once for real on a host that reaches no registry."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml
from commands import argv, kvbench
from sshhosts import no_hosts_reason, standing

from kvbench.core.scenario.hosts import RemoteHost
from kvbench.errors import InputError
from kvbench.planning.install_hosts import Install, build_wheel, install_commands, prepare
from kvbench.version import __version__

REASON = no_hosts_reason()
on_request = pytest.mark.skipif(
    os.environ.get("KVBENCH_TEST_SSH", "") != "1", reason="takes a minute: `make test-ssh` runs it"
)
ROOT = Path(__file__).resolve().parents[2]


def test_the_commands_on_a_host_do_what_they_say(tmp_path: Path) -> None:
    host = RemoteHost(address="10.0.0.1", workdir=str(tmp_path / "a folder"), python="python3")
    assert "--no-index" not in install_commands(host, "/w/kvbench.whl")
    words = install_commands(host, "/w/kvbench.whl", ("mooncake", "ssh"), "/w/wheels.tar")
    assert (
        f"--no-index --find-links '{tmp_path}/a folder/wheels' --upgrade /w/kvbench.whl'[mooncake,ssh]'"
        in words
    )
    assert words.count("--no-index") == 2
    assert subprocess.run(["sh", "-n", "-c", words], check=False).returncode == 0


def test_wheels_are_packed_as_they_are(tmp_path: Path) -> None:
    house, out = tmp_path / "house", tmp_path / "out"
    house.mkdir()
    out.mkdir()
    wheel = tmp_path / "kvbench-1-py3-none-any.whl"
    with pytest.raises(InputError, match="has no wheels"):
        prepare(Install(wheel, house), out)
    (house / "one-1-py3-none-any.whl").write_text("1")
    ready = prepare(Install(wheel, house), out)
    assert ready.wheels is not None
    with tarfile.open(ready.wheels) as tar:
        assert tar.getnames() == ["one-1-py3-none-any.whl"]
    assert prepare(Install(wheel), out).wheels is None


@on_request
def test_a_build_leaves_nothing_beside_the_sources(tmp_path: Path) -> None:
    before = sorted(path.name for path in ROOT.iterdir())
    assert build_wheel(tmp_path).name.startswith(f"kvbench-{__version__}-")
    assert sorted(path.name for path in ROOT.iterdir()) == before
    assert not (ROOT / "build").exists()


@on_request
@pytest.mark.skipif(bool(REASON), reason=REASON)
@pytest.mark.timeout(900)
def test_a_host_without_a_registry_gets_all_it_needs(tmp_path: Path) -> None:
    with standing(tmp_path, ("a", "b")) as hosts:
        assert "default" not in hosts.inside("a", "ip", "route")
        sections = {name: hosts.section(name) for name in "ab"}
        for section in sections.values():
            del section["python"]
        path = tmp_path / "far.yaml"
        text = {
            "version": 1,
            "model": "tiny",
            "deployment": {"launcher": "ssh", "hosts": sections, "roles": {"prefill": "a", "decode": "b"}},
            "connectors": ["tcp"],
            "workload": {"input_len": [64], "output_len": 4},
            "slo": {"ttft_ms": 200},
        }
        path.write_text(yaml.safe_dump(text, sort_keys=False))
        command = argv("hosts", "install", str(path), "--bring")
        done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        for name in "ab":
            work = hosts.folder / "work" / name
            assert f"{name}: kvbench {__version__} in {work}/venv" in done.stdout.replace("\n", "")
            assert not (work / "wheels").exists()
            where = [f"{work}/venv/bin/python", "-I", "-c", "import kvbench, numpy; print(kvbench.__file__)"]
            located = subprocess.run(where, cwd="/", capture_output=True, text=True, check=True)
            assert located.stdout.startswith(str(work))
        looked = kvbench("doctor", "--hosts", str(path)).succeeded()
        assert looked.out.count(f"kvbench {__version__}, Python {sys.version.split()[0]}") == 2
