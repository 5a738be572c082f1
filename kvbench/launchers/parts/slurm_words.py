"""Slurm's command lines and outputs as values, for ``launchers/slurm.py``. Options as in salloc(1), srun(1),
squeue(1) and scontrol(1) of Slurm 22.05 and later."""

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
"""Environment variables that an agent needs to run; no others are passed."""
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
    """One part of a job; its nodes share ``roles``."""

    roles: tuple[str, ...]
    wanted: SlurmNodes


@dataclass(frozen=True)
class Queued:
    job_id: str
    state: str
    reason: str
    start: str

    def words(self) -> str:
        reason = self.reason.removeprefix("(").removesuffix(")")
        reason = "just requested" if reason in ("", "None") else reason
        expected = f", expected to start {self.start}" if self.start not in ("", "N/A") else ""
        return f"Slurm job {self.job_id} is {self.state.lower()}: {reason}{expected}"


@dataclass(frozen=True)
class Component:
    """A job, or one component of a heterogeneous job, in scontrol's output."""

    job_id: str
    offset: int | None
    """Number within a heterogeneous job, or None."""
    state: str
    reason: str
    node_list: str
    leader: str = ""
    """Number of its heterogeneous job."""

    def words(self) -> str:
        why = f", reason {self.reason}" if self.reason not in ("", "None") else ""
        return f"Slurm job {self.job_id} is {self.state}{why}"


def groups_of(options: SlurmOptions, *, loadgen_only: bool = False) -> list[SlurmGroup]:
    """Return the job's parts: one per role with its own nodes."""
    if loadgen_only:
        return [SlurmGroup(("loadgen",), _merge(options, options.loadgen or SlurmNodes(), 1))]
    separate = [role for role in SCHEDULED_ROLES if getattr(options, role) is not None]
    shared = tuple(role for role in ("prefill", "decode") if role not in separate)
    groups = [SlurmGroup(shared, _merge(options, SlurmNodes(), 2))] if shared else []
    return groups + [SlurmGroup((role,), _merge(options, getattr(options, role), 1)) for role in separate]


def _merge(options: SlurmOptions, wanted: SlurmNodes, nodes: int) -> SlurmNodes:
    """Merge the role's options over the common ones; further options are concatenated."""
    both = {name: getattr(wanted, name) or getattr(options, name) for name in _VALUES}
    count = wanted.nodes or (options.nodes if wanted == SlurmNodes() else None) or nodes
    return SlurmNodes(
        **both,
        nodes=count,
        exclusive=wanted.exclusive or options.exclusive,
        extra=(*options.extra, *wanted.extra),
    )


def salloc_command(options: SlurmOptions, groups: Sequence[SlurmGroup], job_name: str) -> list[str]:
    """Command that requests all groups as one job, heterogeneous if there are several."""
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
    """Command that runs a shell command on one node next to other steps."""
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
    """Environment variables of a surrounding job, which would change srun's behaviour."""
    kept = ("SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS", "SLURM_CLUSTER_NAME", "SLURM_SACK_KEY")
    prefixes = ("SLURM_", "SLURMD_", "SRUN_")
    return sorted(name for name in environment if name.startswith(prefixes) and name not in kept)


def parse_squeue(text: str) -> list[Queued]:
    """Parse ``squeue --noheader --format=SQUEUE_FORMAT``; skips other lines."""
    rows = [line.strip().split("|") for line in text.splitlines()]
    # A reason may hold the mark itself; nothing else does.
    return [Queued(row[0], row[1], "|".join(row[2:-1]), row[-1]) for row in rows if len(row) >= 4]


def parse_pairs(line: str) -> dict[str, str]:
    """Parse the KEY=VALUE pairs of a line of ``scontrol --oneliner show``; values may have spaces."""
    found = list(_PAIR.finditer(line))
    ends = [*(match.start() for match in found[1:]), len(line)]
    return {match.group(1): line[match.end() : end].strip() for match, end in zip(found, ends, strict=False)}


def parse_job(text: str) -> list[Component]:
    """Parse ``scontrol --oneliner show job ID``, by component. Raises LaunchError."""
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
        raise LaunchError("Slurm reports nothing about the job", hint="see `squeue --me`")
    return sorted(components, key=lambda component: component.offset or 0)


def placed(
    groups: Sequence[SlurmGroup], nodes: Sequence[Sequence[str]], prefill: int, decode: int
) -> dict[str, tuple[str, ...]]:
    """Return role → nodes, from each group's nodes. ``prefill``, ``decode``: numbers of instances. A shared
    group is dealt by them; a spare node gets router and load generator, which otherwise share the first
    prefill node."""
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
    """Deal one pool of nodes to P and D by their instances. Raises LaunchError without a node."""
    if not names:
        raise LaunchError("the allocation has no nodes", hint="see `squeue --me`")
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
