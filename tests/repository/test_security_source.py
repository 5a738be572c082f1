"""What the source never does: unpickle, make objects of YAML, evaluate text, call a shell, guess names."""

import ast
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from commands import wait_until

from kvbench.core.plan.processes import ProcessSpec, shell_script
from kvbench.launchers.local import LocalLauncher

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "kvbench").rglob("*.py"), *(ROOT / "tools").rglob("*.py")])

BANNED_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
BANNED_NAMES = {"eval", "exec", "execfile", "__import__"}
# Attribute calls by the last two names: what runs text, or loads objects from it.
BANNED_CALLS = {
    "os.system", "os.popen", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load",
    "torch.load", "pd.read_pickle", "tempfile.mktemp", "subprocess.getoutput", "subprocess.getstatusoutput",
    "asyncio.create_subprocess_shell",
}  # fmt: skip
# These unpickle objects unless told not to, by older releases' defaults or by a later change of them.
NUMPY_LOADS = {"np.load", "numpy.load"}
STARTS = {"run", "Popen", "call", "check_call", "check_output", "create_subprocess_exec"}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def breaches(tree: ast.AST) -> Iterator[str]:
    """What of the rules above a module does not keep."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names]
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in {name.split(".")[0] for name in names} & BANNED_MODULES:
                yield f"line {node.lineno}: imports {name}"
        elif isinstance(node, ast.Call):
            yield from _call(node)


def _call(node: ast.Call) -> Iterator[str]:
    called = ast.unparse(node.func)
    short = ".".join(called.split(".")[-2:])
    if called in BANNED_NAMES or short in BANNED_CALLS:
        yield f"line {node.lineno}: calls {called}"
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg}
    for name in ("shell", "allow_pickle"):
        if given.get(name, "False") != "False":
            yield f"line {node.lineno}: {name}={given[name]}"
    if short in NUMPY_LOADS and "allow_pickle" not in given:
        yield f"line {node.lineno}: {called} without allow_pickle=False"
    # A command in one text would be split by somebody, sooner or later by a shell.
    if short.split(".")[0] in ("subprocess", "asyncio") and short.split(".")[-1] in STARTS and node.args:
        first = node.args[0]
        if isinstance(first, ast.JoinedStr) or (
            isinstance(first, ast.Constant) and short.startswith("subprocess")
        ):
            yield f"line {node.lineno}: a command as one text"


def test_no_module_runs_or_loads_what_it_is_given() -> None:
    assert len(SOURCES) > 300
    assert [f"{path}: {breach}" for path in SOURCES for breach in breaches(tree_of(path))] == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle", "from pickle import loads", "def f():\n  import dill.source",
        "yaml.load(text, Loader=yaml.SafeLoader)", "import yaml\nyaml.unsafe_load(text)", "eval('1')",
        "exec(code)", "os.system('ls')", "subprocess.run(words, shell=True)",
        "subprocess.run(words, shell=flag)", "subprocess.run('ls -l')", "subprocess.Popen(f'ls {path}')",
        "asyncio.create_subprocess_shell(text)", "np.load(path)", "numpy.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)", "tempfile.mktemp()",
    ],
)  # fmt: skip
def test_the_rule_sees_what_it_forbids(code: str) -> None:
    assert list(breaches(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    ["np.load(path, allow_pickle=False)", "subprocess.run(words, shell=False)", "yaml.safe_load(text)"],
)
def test_the_rule_lets_pass_what_loads_and_runs_nothing(code: str) -> None:
    assert not list(breaches(ast.parse(code)))


def test_connections_of_multiprocessing_carry_bytes_only() -> None:
    """Its ``send`` and ``recv`` pickle; ``send_bytes`` and ``recv_bytes`` do not."""
    found = 0
    for path in SOURCES:
        if "multiprocessing.connection" not in path.read_text():
            continue
        found += 1
        calls = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
        methods = {node.func.attr for node in calls if isinstance(node.func, ast.Attribute)}
        assert not methods & {"send", "recv"}, path
        assert {"send_bytes", "recv_bytes"} <= methods
    assert found == 1


def test_a_fixed_name_in_tmp_is_only_that_of_a_folder_of_one_s_own() -> None:
    """A lab's state makes its folder with mode 0700 and refuses one that is another user's (test_lab.py).

    Ray's own folder there is only read, to see whether a cluster runs.
    """
    guilty = {
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and (node.value == "/tmp" or node.value.startswith("/tmp/"))
    }
    assert {Path(name).name for name in guilty} <= {"state.py", "ray.py"}


# Values of a scenario never reach a shell
HOSTILE = (
    "$(touch escaped)", "`touch escaped`", "; touch escaped #", "a\nb", "'; touch escaped; '", '"$HOME"',
    "*", "-n", "--flag=$(touch escaped)", "é💥", "\\",
)  # fmt: skip


def test_a_started_process_gets_its_words_as_they_are(tmp_path: Path) -> None:
    launcher = LocalLauncher("test-words", tmp_path / "logs", tmp_path / "specs")
    code = "import sys, os, json; print(json.dumps([sys.argv[1:], os.environ['HOSTILE']]))"
    import json
    import sys

    spec = ProcessSpec("words", (sys.executable, "-c", code, *HOSTILE), env={"HOSTILE": "$(touch escaped)"})
    process = launcher.start(spec)
    wait_until(lambda: process.poll() is not None, 20)
    assert json.loads(process.log_path.read_text()) == [list(HOSTILE), "$(touch escaped)"]


def test_printed_commands_are_quoted_for_every_shell_that_reads_them(tmp_path: Path) -> None:
    """What ``kvbench launch --print`` prints, run by a real shell: the words arrive, nothing else runs."""
    program = tmp_path / "words.sh"
    program.write_text('#!/bin/sh\nprintf "%s\\0" "$HOSTILE" "$@"\n')
    program.chmod(0o755)
    spec = ProcessSpec(
        "words", (str(program), *HOSTILE), env={"HOSTILE": "$(touch escaped); `touch escaped`"},
        files={"SPEC": {"text": "EOF\n$(touch escaped)\n'EOF'"}}, spec={"more": "`touch escaped`"},
    )  # fmt: skip
    script = shell_script(spec)
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, timeout=20, check=True)
    environment, *words, path = done.stdout.decode().split("\0")[:-1]
    assert environment == "$(touch escaped); `touch escaped`"
    assert words == list(HOSTILE)
    assert path == "words.json"
    assert not (tmp_path / "escaped").exists()
    assert shlex.quote("é💥")
