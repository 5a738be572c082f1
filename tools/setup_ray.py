"""Makes .venv-ray: Ray, what kvbench needs, and a path to kvbench itself. For ``make test-ray`` alone.

Ray with its dependencies is 240 MB and pins some packages that kvbench's own environment has in other
versions, so it does not go there. Run by .venv's Python after ``make setup``: ``python tools/setup_ray.py``.
"""

import sys

from setup_base import CONSTRAINTS, ROOT, run, say, tail

VENV = ROOT / ".venv-ray"
PYTHON = VENV / "bin" / "python"
RAY = "ray==2.60.0"
STEP_DEADLINE_S = 900.0
TESTS = ("pytest", "pytest-timeout", "hypothesis")


def wanted() -> list[str]:
    text = (ROOT / "pyproject.toml").read_text()
    block = text.split("\ndependencies = [", 1)[1].split("\n]", 1)[0]
    own = [line.strip().strip('",') for line in block.splitlines() if line.strip()]
    return [RAY, *own, *TESTS]


def main() -> int:
    stamp = VENV / "kvbench-ray.txt"
    needed = "\n".join([*wanted(), CONSTRAINTS.read_text()])
    if stamp.exists() and stamp.read_text() == needed and "--force" not in sys.argv:
        return 0
    say(f"making {VENV.name} with {RAY} (about 240 MB)")
    steps: list[list[object]] = [
        [sys.executable, "-m", "venv", VENV],
        [PYTHON, "-m", "pip", "install", "-q", "-c", CONSTRAINTS, *wanted()],
    ]
    for step in steps:
        status, output = run(step, STEP_DEADLINE_S)
        if status:
            print(f"set-up failed:\n{tail(output)}", file=sys.stderr)
            return 1
    packages = next((VENV / "lib").glob("python*/site-packages"))
    (packages / "kvbench-here.pth").write_text(f"{ROOT}\n")
    stamp.write_text(needed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
