"""Request a Slurm job, and cancel it when the starting process is gone.

``python -I -S slurm_guard.py JOB_NAME salloc --no-shell …`` needs no kvbench. The job lasts until stdin ends.
It is cancelled by its unique name, which also covers a job with a still unknown number."""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1  # linux/prctl.h
CANCEL_DEADLINE_S = 30.0
SALLOC_GRACE_S = 3.0
CALL_DEADLINE_S = 10.0
SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)


def with_parent() -> None:
    """Make salloc cancel its request (SIGTERM) if this program is killed."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def wait(salloc: "subprocess.Popen[bytes]") -> int:
    """Wait until stdin ends (0) or salloc fails (its status)."""
    while True:
        if select.select([0], [], [], 0.1)[0] and not os.read(0, 4096):
            return 0
        if salloc.poll():
            return salloc.returncode
        if salloc.returncode == 0:
            while os.read(0, 4096):
                pass
            return 0


def cancel(name: str) -> None:
    """Cancel all jobs of that name until Slurm lists none."""
    deadline = time.monotonic() + CANCEL_DEADLINE_S
    selection = [f"--name={name}", f"--user={os.getuid()}"]
    while time.monotonic() < deadline:
        try:
            subprocess.run(["scancel", "--quiet", *selection], timeout=CALL_DEADLINE_S)
            listed = subprocess.run(
                ["squeue", "--noheader", "--format=%i %T", *selection],
                timeout=CALL_DEADLINE_S,
                stdout=subprocess.PIPE,
            )
            if listed.returncode == 0 and not listed.stdout.strip():
                return
        except (OSError, subprocess.TimeoutExpired) as error:
            print(f"cannot cancel the job {name} yet: {error}", file=sys.stderr)
        time.sleep(0.3)
    print(f"the job {name} is still listed: scancel --name={name}", file=sys.stderr)


def main() -> int:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # only the end of stdin counts
    name, command = sys.argv[1], sys.argv[2:]
    try:
        salloc = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=with_parent)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    status = wait(salloc)
    if salloc.poll() is None:
        salloc.terminate()
        try:
            salloc.wait(SALLOC_GRACE_S)
        except subprocess.TimeoutExpired:
            salloc.kill()
            salloc.wait()
    cancel(name)
    return status


if __name__ == "__main__":
    sys.exit(main())
