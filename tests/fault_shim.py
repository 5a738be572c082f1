"""Stands before an engine's command and spoils what it finds: ``fault_shim.py LOGS NAME COMMAND…``.

The label of the deployment, which is the name of its folder of logs, says how. Then it becomes the command.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
from pathlib import Path


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
            path = Path(command[-1])  # a KV pool of 32 GB
            path.write_text(json.dumps({**json.loads(path.read_text()), "num_blocks": 10**6}))
            resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
