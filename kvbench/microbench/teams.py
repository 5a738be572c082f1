"""The workers of a case: whom they can serve, and how they are started, connected and kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvbench.core.transfers import cases
from kvbench.core.transfers.records import Case, Layout, TransferRecord
from kvbench.microbench.settings import Settings
from kvbench.microbench.sides import ANSWER_S, Asked, Side, WorkerHandle, Workers

TOUCH_BYTES_PER_S: Final = 200e6
"""Memory that is touched and registered slower than this is taken for a stuck worker's."""


@dataclass(frozen=True)
class Key:
    """Cases with equal keys can be served by the same workers."""

    backend: str
    protocol: str
    nics: int
    memory: str
    merged: bool
    streams: int
    initiators: int
    targets: int
    op: str

    @classmethod
    def of(cls, case: Case) -> Key:
        return cls(
            case.backend,
            case.protocol,
            case.nics,
            case.memory,
            case.merged,
            max(case.threads, case.nics, 1),
            case.initiators,
            case.targets,
            # Over several NICs, libraries spread reads and writes in different ways.
            case.op if case.nics > 1 else "",
        )


@dataclass
class Team:
    """Workers that stand ready for the cases of one key."""

    key: Key
    layouts: tuple[Layout, Layout]
    """Of the initiators' and the targets' buffers."""
    initiators: list[WorkerHandle] = field(default_factory=list)
    targets: list[WorkerHandle] = field(default_factory=list)
    agents: list[dict[str, Any]] = field(default_factory=list)
    open_s: float = 0.0
    register_s: float = 0.0
    connect_s: float | None = None
    """None while it is not connected."""

    @property
    def everyone(self) -> list[WorkerHandle]:
        return [*self.initiators, *self.targets]


def side_number(role: str, number: int) -> int:
    """What keeps the buffers of one team apart."""
    return 2 * number + (role == "target")


class Teams:
    """Keeps the workers of one case for the next one where they can serve both. ``sides`` by role."""

    def __init__(self, sides: Mapping[str, Side], settings: Settings, workers: Workers) -> None:
        self._workers = workers
        self._sides = sides
        self._settings = settings
        self._team: Team | None = None
        self._largest: dict[Key, tuple[Layout, Layout]] = {}
        self._rigid: set[str] = set()

    def expect(self, case: Case) -> None:
        """A case that comes: workers get buffers for the largest of those that they can serve."""
        layouts = (cases.initiator_layout(case), cases.target_layout(case))
        known = self._largest.get(Key.of(case))
        if known is None or layouts[0].nbytes > known[0].nbytes:
            self._largest[Key.of(case)] = layouts

    def fitting(self, case: Case, record: TransferRecord, on_stage: Callable[[str], None]) -> Team:
        """The team of the case before if it can serve this one, or a new one; connected."""
        wanted = (cases.initiator_layout(case), cases.target_layout(case))
        key = Key.of(case)
        if self._team is None or self._team.key != key or self._workers.casualties():
            self.disband(orderly=True)
            rigid = case.backend in self._rigid
            self._team = self._assemble(case, wanted if rigid else self._largest[key])
        if self._team.layouts != wanted and not self._reshape(self._team, wanted):
            self._rigid.add(case.backend)
            self.disband(orderly=True)
            self._team = self._assemble(case, wanted)
        team = self._team
        if team.connect_s is None:
            on_stage("connecting")
            team.connect_s = self._connect(team)
        record.open_s, record.register_s, record.connect_s = team.open_s, team.register_s, team.connect_s
        library = team.initiators[0].hello["library"]
        record.library = f"{library['name']} {library['version']}"
        record.nics_asked = [str(nic["name"]) for nic in self._sides["initiator"].nics[: case.nics]]
        return team

    def _assemble(self, case: Case, layouts: tuple[Layout, Layout]) -> Team:
        key, settings = Key.of(case), self._settings
        team = Team(key, layouts)
        for role, count, layout in (
            ("target", case.targets, layouts[1]),
            ("initiator", case.initiators, layouts[0]),
        ):
            for number in range(count):
                spec = {
                    "role": role,
                    "backend": case.backend,
                    "options": {
                        "role": role,
                        **self._options(key, self._sides[role]),
                        **self._gpu(key, role, number),
                    },
                    "layout": layout.to_json(),
                    "memory": case.memory,
                    "seed": settings.seed,
                    "side": side_number(role, number),
                }
                name = role if count == 1 else f"{role}-{number}"
                worker = self._workers.start(name, self._sides[role], spec)
                (team.targets if role == "target" else team.initiators).append(worker)
        size = max(layout.nbytes for layout in layouts)
        self._workers.hello(team.everyone, settings.open_s + size / TOUCH_BYTES_PER_S)
        team.agents = [worker.hello["agent"] for worker in team.targets]
        team.open_s = max(worker.hello["open_s"] for worker in team.everyone)
        team.register_s = max(worker.hello["register_s"] for worker in team.everyone)
        return team

    def _options(self, key: Key, side: Side) -> dict[str, Any]:
        nics = [dict(nic) for nic in side.nics[: key.nics]]
        return {
            "host": next((nic["address"] for nic in nics if nic.get("address")), side.host),
            "protocol": key.protocol,
            "merge": key.merged,
            "streams": key.streams,
            **({"nics": nics} if nics else {}),
            **({"op": key.op} if key.op else {}),
            **dict(self._settings.options.get(key.backend, {})),
        }

    def _gpu(self, key: Key, role: str, number: int) -> dict[str, Any]:
        """Whose turn a worker has at the GPUs of its host: on one host all have different ones, if it can."""
        if key.memory != "cuda":
            return {}
        one, other = self._sides["initiator"], self._sides["target"]
        together = one.host_key == other.host_key
        return {"memory": "cuda", "gpu_turn": number + key.initiators * (together and role == "target")}

    def _reshape(self, team: Team, layouts: tuple[Layout, Layout]) -> bool:
        asked: list[Asked] = [
            (worker, "reshape", {"layout": layout.to_json()})
            for workers, layout in ((team.initiators, layouts[0]), (team.targets, layouts[1]))
            for worker in workers
        ]
        answers = self._workers.ask(asked, self._settings.connect_s)
        if any(answer["agent"] is None for answer in answers):
            return False
        team.agents = [answer["agent"] for answer in answers[len(team.initiators) :]]
        team.layouts, team.connect_s = layouts, None
        return True

    def _connect(self, team: Team) -> float:
        """Each initiator to each target; the longest time."""
        limit = self._settings.connect_s
        longest = 0.0
        for agent in team.agents:
            asked: list[Asked] = [
                (worker, "connect", {"peer": agent, "deadline_s": limit}) for worker in team.initiators
            ]
            answers = self._workers.ask(asked, limit + ANSWER_S)
            longest = max(longest, *(answer["connect_s"] for answer in answers))
        return longest

    def disband(self, *, orderly: bool) -> None:
        """End all workers: by request where they still listen, else by force."""
        self._team = None
        self._workers.stop(orderly=orderly)
