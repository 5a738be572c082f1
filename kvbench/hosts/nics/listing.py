"""``python -m kvbench.hosts.nics.listing rdma|tcp``: print this machine's or namespace's NICs as JSON. A
microbenchmark runs it on the other machine with a worker's command prefix."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Final

from kvbench.errors import EXIT_BAD_INPUT, EXIT_OK, LaunchError
from kvbench.hosts.nics import choice as nics

DEADLINE_S: Final = 20.0


def listing(kind: nics.Kind, names: Sequence[str] = ()) -> dict[str, Any]:
    """``{"usable": [NIC…], "left_out": {name: reason}}``, in order of preference. ``names``: only these, in
    order, including virtual NICs, and for TCP the interface of a named RDMA device."""
    if names:
        return _named(kind, names)
    found = nics.find(kind)
    ordered = nics.in_order(found.usable)
    return {"usable": [nic.to_json() for nic in ordered], "left_out": dict(found.left_out)}


def _named(kind: nics.Kind, names: Sequence[str]) -> dict[str, Any]:
    found = nics.find(kind, in_lab=True)
    devices = {nic.name: nic.interface for nic in nics.find("rdma").usable} if kind == "tcp" else {}
    usable = {nic.name: nic for nic in found.usable}
    wanted = [name if name in usable else devices.get(name, name) for name in names]
    return {
        "usable": [usable[name].to_json() for name in wanted if name in usable],
        "left_out": {
            name: found.left_out.get(name, "there is no such NIC") for name in wanted if name not in usable
        },
    }


def there(prefix: Sequence[str], python: str, kind: nics.Kind) -> nics.Found:
    """NICs behind a command prefix. Raises LaunchError if unreachable or without kvbench."""
    command = [*prefix, python, "-m", __name__, kind]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{' '.join(command)} did not respond within {DEADLINE_S:g} s") from None
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be started: {error.strerror}") from error
    except (IndexError, ValueError):
        last = " | ".join(done.stderr.strip().splitlines()[-2:])
        raise LaunchError(
            f"{' '.join(command)} ended with exit code {done.returncode}: {last}",
            hint="install kvbench there; name its Python with --peer-python",
        ) from None
    return nics.Found(tuple(nics.Nic(**nic) for nic in answer["usable"]), answer["left_out"])


def main(argv: Sequence[str]) -> int:
    if list(argv) not in (["rdma"], ["tcp"]):
        print("name a kind of NIC: rdma or tcp", file=sys.stderr)
        return EXIT_BAD_INPUT
    print(json.dumps(listing("rdma" if argv[0] == "rdma" else "tcp")))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
