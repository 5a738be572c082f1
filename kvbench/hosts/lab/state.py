"""State of labs outside their process: one file each, in the user's runtime folder."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from kvbench.errors import LabError
from kvbench.files import write_json
from kvbench.hosts.lab.hosts import NETNS_FOLDER, Host, LabProcess, may_use_netns
from kvbench.hosts.lab.layout import LabPlan

STATE_SCHEMA: Final = 1
LOCK_DEADLINE_S: Final = 20.0
POLL_S: Final = 0.02


@dataclass
class Fault:
    """A fault planted on one NIC. ``seen_before`` is its counter's value at that time."""

    kind: str
    nic: int
    amount: str = ""
    seen_before: int = 0


@dataclass
class LabState:
    """A lab in its file. Without an owner it exists until `lab down`."""

    plan: LabPlan
    hosts: dict[str, Host] = field(default_factory=dict)
    owner: LabProcess | None = None
    """Process that sets it up, or uses it for a run; when it has ended, the lab is a leftover."""
    ready: bool = False
    congestion: str = ""
    """Congestion control of connections between the hosts."""
    kernel: str = ""
    created_at: str = ""
    notes: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    @property
    def standing(self) -> bool:
        return self.ready and not self.left_over and all(host.exists for host in self.hosts.values())

    @property
    def left_over(self) -> bool:
        """Whether no process uses it or will remove it."""
        if self.owner is not None:
            return not self.owner.alive
        return not all(host.exists for host in self.hosts.values())

    def save(self) -> None:
        write_json(path_of(self.plan.name), self.to_json())

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": STATE_SCHEMA,
            "plan": asdict(self.plan),
            "rate_bits_per_s": self.plan.bits_per_s,
            "burst_bytes": self.plan.burst_bytes,
            "hosts": {side: host.to_json() for side, host in self.hosts.items()},
            "owner": None if self.owner is None else [self.owner.pid, self.owner.started],
            "ready": self.ready,
            "congestion": self.congestion,
            "kernel": self.kernel,
            "created_at": self.created_at,
            "notes": self.notes,
            "faults": [vars(fault) for fault in self.faults],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LabState:
        if data["schema"] != STATE_SCHEMA:
            raise ValueError(f"schema {data['schema']}")
        return cls(
            plan=LabPlan(**data["plan"]),
            hosts={side: Host.from_json(host) for side, host in data["hosts"].items()},
            owner=LabProcess(*data["owner"]) if data["owner"] else None,
            ready=data["ready"],
            congestion=data["congestion"],
            kernel=data["kernel"],
            created_at=data["created_at"],
            notes=data["notes"],
            faults=[Fault(**fault) for fault in data["faults"]],
        )


def folder() -> Path:
    """Return the files' folder: below XDG_RUNTIME_DIR, else /tmp, private to the user. Raises LabError if the
    folder is another user's, or cannot be made."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    place = Path(runtime) / "kvbench" if runtime else Path("/tmp") / f"kvbench-{os.getuid()}"
    labs = place / "labs"
    try:
        for path in (place, labs):
            path.mkdir(mode=0o700, exist_ok=True)
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                raise LabError(f"{path} is not this user's folder", hint="remove it, or set XDG_RUNTIME_DIR")
            if stat.S_IMODE(found.st_mode) != 0o700:
                path.chmod(0o700)
    except OSError as error:
        raise LabError(
            f"cannot keep the lab's state in {labs}: {error}", hint="set XDG_RUNTIME_DIR to your folder"
        ) from error
    return labs


def path_of(name: str) -> Path:
    return folder() / f"{name}.json"


def load(name: str) -> LabState | None:
    """Return the lab of that name; None without a readable file."""
    try:
        return LabState.from_json(json.loads(path_of(name).read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def all_states() -> list[LabState]:
    found = [load(path.stem) for path in sorted(folder().glob("*.json"))]
    return [state for state in found if state is not None]


def unrecorded() -> list[str]:
    """Return the names of labs with namespaces but without a file: lost, or in another folder. Empty without
    root, which alone can make or remove them."""
    if not may_use_netns():
        return []
    known = {host.namespace for state in all_states() for host in state.hosts.values()}
    known |= {state.plan.namespace(side) for state in all_states() for side in ("A", "B")}
    names = set()
    for path in NETNS_FOLDER.glob("kvbench-*-[AB]"):
        if path.name not in known:
            names.add(path.name.removeprefix("kvbench-")[:-2])
    return sorted(names)


@contextmanager
def locked() -> Iterator[None]:
    """Let one process at a time find, claim or remove labs. Raises LabError after a timeout."""
    deadline = time.monotonic() + LOCK_DEADLINE_S
    with (folder() / ".lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LabError(
                        f"another kvbench has held {file.name} for {LOCK_DEADLINE_S:g} s",
                        hint="wait for it or end it, then try again",
                    ) from None
                time.sleep(POLL_S)
        yield
