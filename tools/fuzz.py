"""``make fuzz``: the fuzz tests of the default suite with many more examples, new ones each time.

``FUZZ_EXAMPLES`` says how many for each test (default 500). What is found is printed by hypothesis, and
tried first in each later run, from ``.hypothesis/fuzz``; as a file in ``tests/recorded/fuzz`` it is tried
whenever the tests run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
EXAMPLES: Final = "500"
TEST_DEADLINE_S: Final = 3600


def main(arguments: Sequence[str]) -> int:
    tests = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_fuzz*.py"))
    options = f"-p no:xdist -o faulthandler_timeout={TEST_DEADLINE_S} --timeout {TEST_DEADLINE_S}".split()
    environment = {"FUZZ_EXAMPLES": EXAMPLES, **os.environ}
    words = [sys.executable, "-m", "pytest", *tests, *options, *arguments]
    return subprocess.run(words, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
