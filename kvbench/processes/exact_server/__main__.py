"""``python -m kvbench.processes.exact_server SPEC.json``: exits 0 after SIGTERM, 2 bad spec, 98 busy port.
Prints ``{"event": "ready", "port": …, "url": …, "kernel_stamps": …}`` once it listens."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections.abc import Sequence
from typing import Final

from kvbench.core.plan.processes import EXACT_SERVER_MODULE
from kvbench.errors import InputError, KvbenchError
from kvbench.processes.common.entry import print_error, raise_open_files, read_spec, shorten_slice
from kvbench.processes.exact_server.server import ExactServer
from kvbench.processes.exact_server.spec import ExactSpec

PR_SET_TIMERSLACK: Final = 29  # linux/prctl.h; by default the kernel may wake this process 50 µs late


def main(argv: Sequence[str]) -> int:
    shorten_slice()
    try:
        spec = read_spec(ExactSpec, argv)
        spec.check()
        raise_open_files()
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
        server = ExactServer(spec)
    except KvbenchError as error:
        return print_error(EXACT_SERVER_MODULE, error)
    except OSError as error:
        return print_error(
            EXACT_SERVER_MODULE, InputError(f"cannot listen on {spec.host}:{spec.port}: {error.strerror}")
        )
    host = f"[{spec.host}]" if ":" in spec.host else spec.host
    ready = {
        "event": "ready",
        "port": server.port,
        "url": f"http://{host}:{server.port}",
        "kernel_stamps": server.kernel_stamps,
    }
    print(json.dumps(ready), flush=True)
    gc.freeze()
    gc.disable()  # a collection stops all streams, and cycles are short-lived
    server.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
