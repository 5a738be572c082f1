"""``make sanitize``: the C extensions, their tests and their fuzz under GCC's sanitizers.

``python -m tools.sanitize [address] [thread] [PYTEST_ARGS]``: ``address`` is ASAN and UBSAN, ``thread`` is
TSAN. Each compiles the extensions in its copy of the sources in ``build/sanitize/``. ``FUZZ_EXAMPLES``
(default 100) is the number of new examples of each fuzz test.

The sanitizer is loaded before the usual Python. ASAN sees all memory of the C library's heap, Python's
objects among it (PYTHONMALLOC=malloc). TSAN sees every lock and what our C reads and writes, not what Python
does to memory without a call to our C. Memory leaks are not looked for: Python itself ends with much that is
not freed.

Exit codes: 0 clean, 1 a finding or a failed test, 4 not run here (no compiler, no sanitizer that works).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.bench import ROOT, output_of

BUILD: Final = ROOT / "build" / "sanitize"
COPIED: Final = ("kvbench", "tests", "tools", "scenarios", "docs", "results/reference")
COPIED_FILES: Final = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "Makefile")
CANARY: Final = Path(__file__).with_name("canary.c")
EXIT_CLEAN, EXIT_FOUND, EXIT_NOT_RUN = 0, 1, 4
BUILD_DEADLINE_S: Final = 300.0
CANARY_DEADLINE_S: Final = 60.0
MOST_SHOWN: Final = 3
EXAMPLES: Final = "100"

TESTS: Final = (
    "tests/core/search/replay/test_queues.py",
    *("tests/processes/http1", "tests/processes/loadgen/test_loadgen_loop.py"),
    "tests/processes/loadgen/test_loadgen_answer.py",
    "tests/processes/loadgen/test_foreign_answers.py",
    *("tests/processes/loadgen/test_loadgen_direct.py", "tests/processes/router/test_router_stream.py"),
    *("tests/processes/router/test_fuzz_http.py", "tests/processes/exact_server/test_exact.py"),
)
"""Those in whose process, or in processes of theirs, compiled code runs."""
LEFT_OUT: Final = (
    "test_each_oddity_is_named",
    "test_a_client_that_does_not_read_holds_d_back_and_costs_little_memory",
    "test_absurd_descriptors_take_no_memory",
)
"""Tests of speed and memory, which a sanitizer changes: it keeps freed memory and shadows all of it."""


@dataclass(frozen=True)
class Sanitizer:
    """One way to compile and run: its canaries are the faults that it must see."""

    flags: tuple[str, ...]
    library: str
    canaries: tuple[str, ...]
    options: Mapping[str, str]
    """Environment variable → options; ``log_path`` is added to each."""


COMMON: Final = ("-g", "-O1", "-fno-omit-frame-pointer")
SANITIZERS: Final = {
    "address": Sanitizer(
        (*COMMON, "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
        "libasan.so",
        ("address", "undefined"),
        {
            "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1:strict_string_checks=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        },
    ),
    # A child that was forked from a process with threads runs until it executes another program.
    "thread": Sanitizer(
        (*COMMON, "-fsanitize=thread"),
        "libtsan.so",
        ("thread",),
        {"TSAN_OPTIONS": "die_after_fork=0:second_deadlock_stack=1:history_size=5:exitcode=66"},
    ),
}


class NotRunError(Exception):
    """Nothing can be said here, and why."""


def compiler() -> str:
    """The C compiler; raises NotRunError without one, or without what it needs."""
    found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if found is None:
        raise NotRunError("there is no C compiler")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise NotRunError("Python's headers are not installed")
    return found


def copy(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.pyc", ".hypothesis")
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in COPIED_FILES:
        shutil.copy(ROOT / name, folder)


def compile_all(sanitizer: Sanitizer, folder: Path) -> None:
    """The extensions of a copy, beside their sources, and the canary."""
    flags = " ".join(sanitizer.flags)
    environment = {"CC": compiler(), "CFLAGS": f"{flags} -Werror", "LDFLAGS": flags}
    words = [sys.executable, "-c", "from setuptools import setup; setup()", "-q", "build_ext", "--inplace"]
    _, output = output_of(words, BUILD_DEADLINE_S, folder, environment)
    built = {path.name.partition(".")[0] for path in (folder / "kvbench").rglob("*.so")}
    missing = modules(folder) - built
    if missing or not built:
        raise NotRunError(f"{', '.join(sorted(missing))} did not compile:\n{output[-2000:]}")
    words = [compiler(), *sanitizer.flags, "-shared", "-fPIC", "-o", "canary.so", str(CANARY)]
    _, output = output_of(words, BUILD_DEADLINE_S, folder)
    if not (folder / "canary.so").exists():
        raise NotRunError(f"the canary did not compile:\n{output[-2000:]}")


def modules(folder: Path) -> set[str]:
    return {
        path.stem
        for path in (folder / "kvbench").rglob("*.c")
        if f"PyInit_{path.stem}(" in path.read_text(encoding="utf-8")
    }


def environment(sanitizer: Sanitizer, folder: Path) -> dict[str, str]:
    """Under which a Python, and each that it starts, runs with the sanitizer and the copy's modules."""
    words = [compiler(), f"-print-file-name={sanitizer.library}"]
    library = output_of(words, CANARY_DEADLINE_S, folder)[1].strip()
    if not Path(library).is_absolute():
        raise NotRunError(f"the compiler has no {sanitizer.library}")
    reports = folder / "reports" / "report"
    reports.parent.mkdir(exist_ok=True)
    return {
        "LD_PRELOAD": library,
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": str(folder),
        **{name: f"{words}:log_path={reports}" for name, words in sanitizer.options.items()},
    }


def reports(folder: Path) -> list[str]:
    """What the sanitizer has said so far, a text a process; they are taken away."""
    found = sorted((folder / "reports").iterdir())
    texts = [path.read_text(errors="replace") for path in found]
    for path in found:
        path.unlink()
    return texts


def hear(sanitizer: Sanitizer, folder: Path, environment: Mapping[str, str]) -> list[str]:
    """What must stand before a command here. Raises NotRunError if the canaries are not seen."""
    said = ""
    # An address space laid out at random may be one that TSAN cannot use.
    for before in ([], ["setarch", "-R"]):
        if before and shutil.which(before[0]) is None:
            continue
        seen = []
        for name in sanitizer.canaries:
            code = f"import ctypes; ctypes.CDLL('./canary.so').{name}(4)"
            words = [*before, sys.executable, "-c", code]
            _, output = output_of(words, CANARY_DEADLINE_S, folder, environment)
            told = [output, *reports(folder)]
            seen.append(any("Sanitizer" in text or "runtime error" in text for text in told))
            said = "\n".join(told)[-1000:]
        if all(seen):
            return before
    raise NotRunError(f"a deliberate fault was not seen:\n{said}")


def sanitize(name: str, arguments: Sequence[str]) -> int:
    sanitizer, folder = SANITIZERS[name], BUILD / name
    print(f"sanitize {name}: compiling into {folder.relative_to(ROOT)}", flush=True)
    copy(folder)
    compile_all(sanitizer, folder)
    around = environment(sanitizer, folder)
    before = hear(sanitizer, folder, around)
    # Everything takes several times as long.
    options = ["-k", " and ".join(f"not {name}" for name in LEFT_OUT), "-p", "no:cacheprovider"]
    options += ["-o", "faulthandler_timeout=1800", "--timeout", "900"]
    tests = [] if any("test_" in argument for argument in arguments) else list(TESTS)
    words = [*before, sys.executable, "-m", "pytest", "-q", *tests, *options, *arguments]
    examples = {"FUZZ_EXAMPLES": EXAMPLES, **os.environ}["FUZZ_EXAMPLES"]
    around |= {"FUZZ_EXAMPLES": examples, "PYTHONDONTWRITEBYTECODE": "1"}
    status = subprocess.run(words, cwd=folder, env={**os.environ, **around}, check=False).returncode
    found = reports(folder)
    for text in found[:MOST_SHOWN]:
        print(text)
    if len(found) > MOST_SHOWN:
        print(f"… and reports of {len(found) - MOST_SHOWN} processes more")
    said = f"{len(found)} processes were reported" if found else "nothing was reported"
    print(f"sanitize {name}: {said}; the tests ended with status {status}", flush=True)
    return EXIT_FOUND if found or status else EXIT_CLEAN


def main(arguments: Sequence[str]) -> int:
    names = [argument for argument in arguments if argument in SANITIZERS] or list(SANITIZERS)
    rest = [argument for argument in arguments if argument not in SANITIZERS and argument != "--"]
    codes = []
    for name in names:
        try:
            codes.append(sanitize(name, rest))
        except NotRunError as error:
            print(f"sanitize {name}: not run here: {error}", file=sys.stderr)
            codes.append(EXIT_NOT_RUN)
    return next((code for code in (EXIT_FOUND, EXIT_NOT_RUN) if code in codes), EXIT_CLEAN)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
