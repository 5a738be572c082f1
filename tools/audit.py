"""``make audit``: known vulnerabilities of the pinned dependencies, by pip-audit.

Exit codes: 0 none known, 1 some are, 4 not run here (no pip-audit to be had, or no answer for some package
from the service that knows vulnerabilities). What was not looked at is never taken for clean.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tools.bench import ROOT, output_of

PINNED: Final = ROOT / "constraints.txt"
INSTALL_DEADLINE_S: Final = 180.0
AUDIT_DEADLINE_S: Final = 180.0
EXIT_CLEAN, EXIT_FOUND, EXIT_NOT_RUN = 0, 1, 4
MOST_SHOWN: Final = 3


def audit(program: Sequence[str], pinned: Path = PINNED) -> int:
    """Asks pip-audit about every line of ``pinned``, prints what it says, and returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="kvbench-audit-") as folder:
        found = Path(folder) / "audit.json"
        options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
        words = [*program, "--requirement", str(pinned), *options, "--output", str(found)]
        status, output = output_of(words, AUDIT_DEADLINE_S)
        try:
            data = json.loads(found.read_text())
        except (OSError, ValueError):
            return not_run(f"pip-audit ended with status {status}: {_last_line(output)}")
    return say(data)


def say(data: Any) -> int:
    packages = data.get("dependencies", []) if isinstance(data, dict) else []
    skipped = [package for package in packages if "skip_reason" in package]
    looked_at = [package for package in packages if "skip_reason" not in package]
    found = [(package, vulnerability) for package in looked_at for vulnerability in package.get("vulns", ())]
    for package, vulnerability in found:
        fixed = ", ".join(vulnerability.get("fix_versions") or ()) or "no version yet"
        print(f"{package['name']} {package['version']}: {vulnerability['id']}, fixed in {fixed}")
    for package in skipped[:MOST_SHOWN]:
        print(f"not looked at: {package['skip_reason']}")
    print(
        f"{len(looked_at)} of {len(packages)} pinned packages looked at, {len(found)} known vulnerabilities"
    )
    if found:
        return EXIT_FOUND
    if skipped or not looked_at:
        return not_run(f"nothing is known of {len(skipped)} of {len(packages)} packages")
    return EXIT_CLEAN


def not_run(why: str) -> int:
    print(f"not run here: {why}", file=sys.stderr)
    print("run `make audit` where the vulnerability service of the package index answers", file=sys.stderr)
    return EXIT_NOT_RUN


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def main() -> int:
    there = shutil.which("pip-audit")
    if there:
        return audit([there])
    with tempfile.TemporaryDirectory(prefix="kvbench-audit-") as folder:
        python = str(Path(folder) / "bin" / "python")
        pip = [python, "-m", "pip", "install", "-q", "pip-audit"]
        for words in ([sys.executable, "-m", "venv", folder], pip):
            status, output = output_of(words, INSTALL_DEADLINE_S)
            if status:
                return not_run(f"pip-audit cannot be installed: {_last_line(output)}")
        return audit([python, "-m", "pip_audit"])


if __name__ == "__main__":
    sys.exit(main())
