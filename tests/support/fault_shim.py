"""Stands before an engine's command and spoils what it finds: ``fault_shim.py LOGS NAME COMMAND…``.

The label of the deployment, which is the name of its folder of logs, says how. Then it becomes the command.
"""

import json
import os
import resource
import socket
import sys
from pathlib import Path

HANGING = "library_hangs_in_pair"


def main() -> None:
    fault, name, command = Path(sys.argv[1]).name, sys.argv[2], sys.argv[3:]
    if name == "decode-0":
        if fault == "port_taken":
            port = json.loads(Path(command[-1]).read_text())["port"]
            held = socket.create_server(("127.0.0.1", port))
            held.set_inheritable(True)  # held on by what this becomes
        elif fault == "out_of_files":
            resource.setrlimit(resource.RLIMIT_NOFILE, (14, 14))
        elif fault == "out_of_memory":
            _changed(Path(command[-1]), num_blocks=10**6)  # a KV pool of 32 GB
            resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))
        elif fault == HANGING:
            _with_hanging_library(Path(sys.argv[1]))
            _changed(Path(command[-1]), transfer_timeout_s=3.0)
    os.execvp(command[0], command)


def _changed(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def _with_hanging_library(logs: Path) -> None:
    """An outside package takes the place of the backend ``tcp``, and hangs when it is told to."""
    import outside_backends

    folder = logs / "outside"
    folder.mkdir()
    outside_backends.install(folder, {"tcp": "HANGING_TCP"})
    os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{Path(__file__).parent}"
    os.environ[outside_backends.HANG_FILE] = str(logs / "hang")


if __name__ == "__main__":
    main()
