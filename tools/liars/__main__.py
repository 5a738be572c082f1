"""``python -m tools.liars``: the whole bench, as a table."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .cases import CASES
from .trials import honest_deployments, run_case, unable

NOISE = 0.004
"""Share of tokens that come out otherwise: of answers of eight tokens, three in a hundred."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--honest", type=int, default=50, metavar="N", help="honest trials (default: 50)")
    parser.add_argument("--noisy", type=int, default=20, metavar="N", help="with noisy answers (default: 20)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="LIE", help="only this lie; repeatable"
    )
    wanted = parser.parse_args(argv)
    bad = 0
    with tempfile.TemporaryDirectory(prefix="kvbench-liars-") as name:
        folder = Path(name)
        print(f"{'lie':27} {'verdict':9} {'seconds':>7}  caught by")
        for case in CASES:
            if wanted.only and case.lie not in wanted.only:
                continue
            if reason := unable(case):
                print(f"{case.name:27} not run: {reason}")
                continue
            outcome = run_case(case, folder)
            bad += not outcome.caught
            others = ", ".join(gate for gate in outcome.findings if gate != case.gate)
            seen = f"nobody: {case.gate} says that it saw nothing" if case.unseen else case.gate
            word = seen if outcome.caught else f"NOT CAUGHT by {case.gate}: {outcome.reason}"
            print(
                f"{case.name:27} {outcome.verdict:9} {outcome.seconds:7.1f}  {word}"
                + f" ({others})" * bool(others)
            )
            sys.stdout.flush()
        bad += honest_deployments(wanted.honest, folder)
        if wanted.noisy:
            bad += honest_deployments(wanted.noisy, folder, NOISE)
    return 1 if bad else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "error")
    sys.exit(main(sys.argv[1:]))
