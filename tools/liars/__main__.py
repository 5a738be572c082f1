"""The liars' bench: plants every lie in a real trial and demands that its gate names it, of servers that tell
all of themselves and of foreign ones without /metrics; and that none of fifty honest trials raises an alarm.
``tools/random_systems/honest.py`` demands the same of honest trials on systems drawn at random.

``python -m tools.liars`` or ``make liars``; exit code 1 if a lie got through or an honest trial did not.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.bench import arguments

from .cases import CASES
from .trials import honest_deployments, run_case, unable

NOISE = 0.004
"""Share of tokens that come out otherwise: of answers of eight tokens, three in a hundred."""


def main(argv: Sequence[str]) -> int:
    wanted = arguments(
        __doc__,
        argv,
        honest=(50, "honest trials"),
        noisy=(20, "honest trials with noisy answers"),
        only=((), "only this lie; repeatable"),
    )
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
