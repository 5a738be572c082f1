"""Every command and file that README and docs name is there; what looks or prints is run as it stands."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from kvbench.planning.scenario_files import bundled_names
from tools import commands_page

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "scenarios/README.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]
BIN = str(Path(sys.executable).parent)
LIGHT = {"plan", "scenarios"}
"""What is run as it stands, if the files that it names are there."""
OURS = re.compile(r"^(?:\S*/bin/)?kvbench |^python3? -m kvbench ")
DEADLINE_S = 90


def blocks(page: str) -> list[tuple[str, str]]:
    """The page's code blocks: their language and text."""
    return re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[str]:
    """The commands of a page: lines of bash blocks, lines after `$ `, and indented lines of kvbench's."""
    found: list[str] = []
    for language, text in blocks(page):
        text = re.sub(r"\\\n\s*", " ", re.sub(r"(?m)^(?:\$ )?cat > .*?^END$\n", "", text, flags=re.DOTALL))
        lines = text.splitlines()
        found += [line for line in lines if language == "bash" and line.strip()]
        found += [line[2:] for line in lines if language != "bash" and line.startswith("$ ")]
        found += [line for line in lines if language == "" and line.startswith("kvbench ")]
    outside = re.sub(r"(?s)^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE)
    found += [
        line.strip() for line in outside.splitlines() if re.match(r"    (kvbench|python3|\S*/bin/pip) ", line)
    ]
    return [line for line in found if not line.startswith("#")]


def bare(command: str, cwd: Path = ROOT, *variables: str) -> subprocess.CompletedProcess[str]:
    """A command in a shell that knows kvbench's folder and the system's, and nothing else."""
    env = [f"PATH={BIN}:/usr/bin:/bin", f"HOME={cwd}", *variables]
    return subprocess.run(
        ["env", "-i", *env, "bash", "-euc", command], cwd=cwd, capture_output=True, text=True,
        timeout=DEADLINE_S, check=False,
    )  # fmt: skip


@cache
def help_of(*words: str) -> str:
    done = bare(shlex.join(["kvbench", *words, "--help"]), ROOT, "COLUMNS=200")
    assert done.returncode == 0, done.stderr
    return done.stdout


def words_of(command: str) -> list[str]:
    return shlex.split(OURS.sub("", command.partition("  #")[0]).partition(" > ")[0].partition(" | ")[0])


COMMANDS = sorted({(page, line) for page in PAGES for line in commands(page) if OURS.match(line)})
OTHERS = sorted({(page, line) for page in PAGES for line in commands(page) if not OURS.match(line)})


def test_the_documents_have_commands() -> None:
    assert len(COMMANDS) > 40
    assert {"README.md", "docs/ssh.md", "docs/vllm.md", "docs/install.md"} <= {page for page, _ in COMMANDS}


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=lambda value: value.replace("docs/", "")[:60])
def test_each_command_is_there_and_takes_its_options(page: str, command: str) -> None:
    words = words_of(command)
    depth = 2 if words[0] in ("lab", "hosts") else 1
    text = help_of(*words[:depth])
    for word in words[depth:]:
        if word == "--":
            break
        if word.startswith("-") and len(word) > 1:
            assert re.search(rf"(?<![\w-]){re.escape(word.partition('=')[0])}(?![\w-])", text), word
    scenario = next((word for word in words[1:2] if word in bundled_names()), "")
    if words[0] in LIGHT and "--base-url" not in words:
        named = [word for word in words[1:] if word.endswith(".yaml")]
        if all((ROOT / name).is_file() for name in named):
            require_plan(bare(shlex.join(["kvbench", *words])))
    elif scenario and words[0] in ("sweep", "launch", "bench"):
        sets = [part for at, part in enumerate(words) if part == "--set" or words[at - 1] == "--set"]
        require_plan(bare(shlex.join(["kvbench", "plan", scenario, *sets])))


def require_plan(done: subprocess.CompletedProcess[str]) -> None:
    """Fail if a plan was refused, but not for what this machine lacks: its hosts and ports."""
    assert done.returncode == (2 if done.stdout.startswith("cannot start: ") else 0), done.stderr


@pytest.mark.parametrize(("page", "command"), OTHERS, ids=lambda value: value.replace("docs/", "")[:60])
def test_each_other_command_is_sound(page: str, command: str) -> None:
    """Targets of make exist; everything is a command that a shell can read; files of ours are there."""
    assert bare(f"bash -n <<'END_OF_COMMAND'\n{command}\nEND_OF_COMMAND").returncode == 0
    words = shlex.split(command.partition("  #")[0])
    if words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        makefile = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE) for target in targets)
    for word in words[1:]:
        if word.endswith("Dockerfile") or word.startswith("constraints"):
            assert (ROOT / word).is_file(), word


def test_the_doors_stand_as_they_are(tmp_path: Path) -> None:
    """The files that README writes are read by the commands that follow; the variables it sets are used."""
    text = "\n".join(block for language, block in blocks("README.md") if language == "bash")
    (heredoc,) = re.findall(r"(?m)^cat > \S+ <<'END'\n.*?^END$", text, re.DOTALL)
    assert len(heredoc.splitlines()) <= 20
    name = heredoc.split()[2]
    done = bare(f"{heredoc}\nkvbench plan {name}", tmp_path)
    assert done.returncode == 2, done.stderr
    assert "prefill-0 on p" in done.stdout
    assert re.findall("(?m)^cannot start: (.*?):", done.stdout) == [
        f"host {host} is unreachable" for host in "pd"
    ]
    slurm = (tmp_path / name).read_text()
    match = re.search(r"`launcher: slurm` and `(slurm: \{.*?\})`", " ".join(README.split()))
    kept = [
        line for line in slurm.splitlines() if not re.match(r"  (launcher|hosts|roles):|    [pd]: ", line)
    ]
    at = kept.index("deployment:") + 1
    (tmp_path / "slurm.yaml").write_text(
        "\n".join([*kept[:at], "  launcher: slurm", f"  {match[1]}", *kept[at:]])
    )
    done = bare("kvbench plan slurm.yaml", tmp_path)
    assert done.returncode == 2, done.stderr
    assert re.findall("(?m)^cannot start: (\\S+)", done.stdout) == ["Slurm's"], "only Slurm is missing"


def test_kvbench_is_found_as_readme_says(tmp_path: Path) -> None:
    """After `make sweep` the README puts .venv/bin on the PATH, from the checkout's folder."""
    exported = next(line for line in commands("README.md") if line.startswith("export PATH="))
    (tmp_path / ".venv").symlink_to(Path(BIN).parent)
    done = subprocess.run(
        ["env", "-i", "PATH=/usr/bin:/bin", "bash", "-euc", f"{exported}\nkvbench --version"], cwd=tmp_path,
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("kvbench "), done.stderr


README = (ROOT / "README.md").read_text()


def test_the_page_of_commands_is_as_it_is_generated() -> None:
    assert commands_page.PAGE.read_text() == commands_page.page(), "run python -m tools.commands_page"


@pytest.mark.parametrize(
    "page", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
)
def test_links_and_pictures_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text()):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), target


def test_each_page_is_found_from_the_index_and_the_index_from_the_readme() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert "](docs/README.md)" in README
    for path in (ROOT / "docs").glob("*.md"):
        assert path.name == "README.md" or f"]({path.name})" in index


def test_the_readme_and_the_pages_are_short() -> None:
    assert len(README.splitlines()) <= 180
    for path in (ROOT / "docs").glob("*.md"):
        assert len(path.read_text().splitlines()) <= 250, path.name


def test_scenarios_named_in_examples_exist() -> None:
    for name in re.findall(r"kvbench (?:sweep|plan|launch) ([a-z0-9][a-z0-9.-]*)(?: |$|`)", README):
        assert name in bundled_names() or name in ("my-scenario.yaml", "two-nodes.yaml"), name


def _strangers() -> re.Pattern[str]:
    """This checkout's own path, and the hosts of the package registries that this machine is set to."""
    sources = [value for name, value in os.environ.items() if "INDEX" in name and "://" in value]
    for place in ("/etc/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf"):
        with contextlib.suppress(OSError):
            sources.append(Path(place).expanduser().read_text())
    hosts = set(re.findall(r"https?://(?:[^/@\s]*@)?([^/:\s]+)", "\n".join(sources))) - {
        "localhost",
        "127.0.0.1",
    }
    urls = [rf"://(?:[^/@\s]*@)?{re.escape(host)}" for host in sorted(hosts)]
    return re.compile("|".join(rf"{pattern}(?![\w-])" for pattern in (re.escape(str(ROOT)), *urls)))


def test_no_file_names_this_machine_or_its_registries() -> None:
    strangers = _strangers()
    for folder in ("kvbench", "scenarios", "tools", "notebooks", "docs", "results/reference", "."):
        for path in (ROOT / folder).glob("*" if folder == "." else "**/*"):
            if path.is_file() and path.suffix in (
                ".py",
                ".md",
                ".yaml",
                ".toml",
                ".txt",
                ".ipynb",
                ".json",
                "",
            ):
                found = strangers.search(path.read_text(errors="replace"))
                assert not found, f"{path}: {found}"
