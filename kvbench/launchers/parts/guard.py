"""Run a command that dies with its parent process.

``python -I -S guard.py PARENT_PID COMMAND…`` needs no kvbench and starts in milliseconds. It sets SIGKILL as
the parent-death signal, then executes the command.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    parent = int(sys.argv[1])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the request was made
        sys.exit(1)
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        print(f"cannot run {sys.argv[2]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
