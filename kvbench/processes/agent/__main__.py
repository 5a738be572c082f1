"""``python -m kvbench.processes.agent``: requests on stdin, answers on stdout, its log on stderr."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from kvbench.core.plan.processes import AGENT_MODULE
from kvbench.processes.agent.agent import Agent

STDIN, STDOUT, STDERR = 0, 1, 2


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {AGENT_MODULE}", description=__doc__)
    parser.add_argument("--tag", default="", help="run tag of all processes that it starts")
    chosen = parser.parse_args(argv)
    # Output of a library must not mix with the frames.
    answers = os.dup(STDOUT)
    os.set_inheritable(answers, False)
    os.dup2(STDERR, STDOUT)
    agent = Agent(STDIN, answers, chosen.tag)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: agent.end("it received a signal"))
    agent.run()
    sys.stderr.flush()
    # Do not join threads that wait for a server's answer or for a reader that has gone.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
