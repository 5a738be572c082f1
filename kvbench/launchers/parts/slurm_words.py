"""Slurm's command lines and what its commands print, as values. Pure; ``launchers/slurm.py`` runs them.

Options are those of salloc(1), srun(1), squeue(1) and scontrol(1) of Slurm 22.05 and later.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvbench.core.scenario.hosts import SCHEDULED_ROLES, SlurmNodes, SlurmOptions
from kvbench.errors import LaunchError

_VALUES: Final = (
    "partition",
    "account",
    "qos",
    "reservation",
    "constraint",
    "gres",
    "nodelist",
    "exclude",
    "mem",
    "cpus_per_task",
)
KEPT_ENV: Final = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "TZ",
)
"""What an agent needs of the environment to run at all; everything else stays where it is."""
ENDED: Final = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "COMPLETING",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
SQUEUE_FORMAT: Final = "%i|%T|%R|%S"
_PAIR: Final = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9_:/]*)=")


@dataclass(frozen=True)
class SlurmGroup:
    """One part of a job: its nodes serve ``roles`` together."""

    roles: tuple[str, ...]
    wanted: SlurmNodes


@dataclass(frozen=True)
class Queued:
    """A job as squeue reports it."""

    job_id: str
    state: str
    reason: str
    start: str

    def words(self) -> str:
        """For whoever waits for it."""
        reason = self.reason.removeprefix("(").removesuffix(")")
        reason = "it was just asked for" if reason in ("", "None") else reason
        expected = f", expected to start {self.start}" if self.start not in ("", "N/A") else ""
        return f"Slurm job {self.job_id} is {self.state.lower()}: {reason}{expected}"


@dataclass(frozen=True)
class Component:
    """A job, or one component of a heterogeneous one, as scontrol reports it."""

    job_id: str
    offset: int | None
    """Its number within a heterogeneous job; None for a plain one."""
    state: str
    reason: str
    node_list: str
    leader: str = ""
    """The number of the heterogeneous job that it is part of."""

    def words(self) -> str:
        """How it stands, for a message."""
        why = f", reason {self.reason}" if self.reason not in ("", "None") else ""
        return f"Slurm job {self.job_id} is {self.state}{why}"


def groups_of(options: SlurmOptions, *, loadgen_only: bool = False) -> list[SlurmGroup]:
    """The parts of the job that the options ask for: one for each role that has nodes of its own.

    ``loadgen_only``: the servers run already, and only the load generator is to be placed.
    """
    if loadgen_only:
        return [SlurmGroup(("loadgen",), _merged(options, options.loadgen or SlurmNodes(), 1))]
    own = [role for role in SCHEDULED_ROLES if getattr(options, role) is not None]
    shared = tuple(role for role in ("prefill", "decode") if role not in own)
    groups = [SlurmGroup(shared, _merged(options, SlurmNodes(), 2))] if shared else []
    return groups + [SlurmGroup((role,), _merged(options, getattr(options, role), 1)) for role in own]


def _merged(options: SlurmOptions, wanted: SlurmNodes, nodes: int) -> SlurmNodes:
    """The role's own options over those for all roles; further options are added to each other."""
    both = {name: getattr(wanted, name) or getattr(options, name) for name in _VALUES}
    count = wanted.nodes or (options.nodes if wanted == SlurmNodes() else None) or nodes
    return SlurmNodes(
        **both,
        nodes=count,
        exclusive=wanted.exclusive or options.exclusive,
        extra=(*options.extra, *wanted.extra),
    )


def salloc_command(options: SlurmOptions, groups: Sequence[SlurmGroup], job_name: str) -> list[str]:
    """The command that asks for all groups as one job, heterogeneous if there are several."""
    words = ["salloc", "--no-shell"]
    for index, group in enumerate(groups):
        words += [":"] if index else []
        wanted = group.wanted
        words += [f"--job-name={job_name}", f"--time={options.time}", f"--nodes={wanted.nodes}"]
        words += ["--ntasks-per-node=1"]
        words += [
            f"--{name.replace('_', '-')}={value}" for name in _VALUES if (value := getattr(wanted, name))
        ]
        words += ["--exclusive"] if wanted.exclusive else []
        words += wanted.extra
    return words


def srun_command(component: Component, node: str, env_names: Sequence[str], command: str) -> list[str]:
    """The step that runs a shell command on one node, beside whatever else runs in the allocation.

    Its stdin and stdout are srun's. It has all memory, devices and cores that the job has there: the
    processes it starts are what the job is for.
    """
    whole = [] if component.offset is None else [f"--het-group={component.offset}"]
    return [
        "srun",
        f"--jobid={component.leader or component.job_id}",
        *whole,
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={node}",
        "--overlap",
        "--input=0",
        "--mem=0",
        "--cpu-bind=none",
        "--kill-on-bad-exit=1",
        "--quit-on-interrupt",
        "--job-name=kvbench-agent",
        f"--export={','.join(dict.fromkeys((*KEPT_ENV, *env_names)))}",
        "--chdir=/",
        "sh",
        "-c",
        command,
    ]


def dropped_env(environment: Mapping[str, str]) -> list[str]:
    """Variables that would decide for an srun what this module decides: those of a job that it runs in."""
    kept = ("SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS", "SLURM_CLUSTER_NAME", "SLURM_SACK_KEY")
    prefixes = ("SLURM_", "SLURMD_", "SRUN_")
    return sorted(name for name in environment if name.startswith(prefixes) and name not in kept)


def parse_squeue(text: str) -> list[Queued]:
    """Lines of ``squeue --noheader --format=SQUEUE_FORMAT``. Lines of another form are left out."""
    rows = [line.strip().split("|") for line in text.splitlines()]
    # A reason may hold the mark itself; nothing else does.
    return [Queued(row[0], row[1], "|".join(row[2:-1]), row[-1]) for row in rows if len(row) >= 4]


def parse_pairs(line: str) -> dict[str, str]:
    """A line of ``scontrol --oneliner show``: its KEY=VALUE pairs, whose values may have spaces."""
    found = list(_PAIR.finditer(line))
    ends = [*(each.start() for each in found[1:]), len(line)]
    return {each.group(1): line[each.end() : end].strip() for each, end in zip(found, ends, strict=False)}


def parse_job(text: str) -> list[Component]:
    """The components in what ``scontrol --oneliner show job ID`` prints, in their order.

    Raises LaunchError if there is none.
    """
    components = []
    for line in text.splitlines():
        pairs = parse_pairs(line)
        if "JobId" not in pairs:
            continue
        offset = pairs.get("HetJobOffset", "")
        nodes = pairs.get("NodeList", "")
        components.append(
            Component(
                job_id=pairs["JobId"].split("(")[0].strip(),
                offset=int(offset) if offset.isdecimal() else None,
                state=pairs.get("JobState", "UNKNOWN"),
                reason=pairs.get("Reason", ""),
                node_list="" if nodes == "(null)" else nodes,
                leader=pairs.get("HetJobId", ""),
            )
        )
    if not components:
        raise LaunchError("Slurm tells nothing of the job", hint="look with `squeue --me`")
    return sorted(components, key=lambda each: each.offset or 0)


def placed(
    groups: Sequence[SlurmGroup], nodes: Sequence[Sequence[str]], prefill: int, decode: int
) -> dict[str, tuple[str, ...]]:
    """Role → its nodes, from the nodes of each group. ``prefill``, ``decode``: instances of each.

    A group that serves both is dealt out by their numbers. A node beyond one per instance is left to the
    router and the load generator; otherwise these are with the first prefill instance.
    """
    hosts: dict[str, tuple[str, ...]] = {}
    for group, names in zip(groups, nodes, strict=True):
        if group.roles == ("prefill", "decode"):
            hosts |= dealt(tuple(names), prefill, decode)
        else:
            hosts |= {role: tuple(names) for role in group.roles}
    if "prefill" not in hosts:  # the servers run already
        return {"loadgen": hosts["loadgen"]}
    hosts.setdefault("router", hosts["prefill"][:1])
    hosts.setdefault("loadgen", hosts["router"][:1])
    return hosts


def dealt(names: tuple[str, ...], prefill: int, decode: int) -> dict[str, tuple[str, ...]]:
    """The nodes of one pool for P and D, whose instances are so many. Raises LaunchError without a node."""
    if not names:
        raise LaunchError("the allocation has no nodes", hint="look with `squeue --me`")
    if len(names) == 1:
        return {"prefill": names, "decode": names}
    if len(names) > prefill + decode:
        spare = names[prefill + decode :]
        return {
            "prefill": names[:prefill],
            "decode": names[prefill : prefill + decode],
            "router": spare[:1],
            "loadgen": spare,
        }
    share = round(len(names) * prefill / (prefill + decode))
    cut = min(max(share, 1), len(names) - 1)
    return {"prefill": names[:cut], "decode": names[cut:]}
