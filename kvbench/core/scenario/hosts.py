"""Hosts of a scenario: how each is reached, where its servers listen, and their roles. Pure.

Slurm or Ray may provide them."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator, model_validator

from kvbench.core.scenario.base import NAME_PATTERN, Section, Several, as_tuple, custom

ADDRESS: Final = r"^[A-Za-z0-9][A-Za-z0-9.-]{0,252}$"
_TEXT: Final = r"^[^\x00\n]*$"
PathText = Annotated[str, Field(max_length=4096, pattern=_TEXT)]

HostName = Annotated[str, Field(pattern=NAME_PATTERN)]
EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


def _one_or_more(raw: Any) -> Any:
    return (raw,) if isinstance(raw, str) else as_tuple(raw)


_NAMES_SCHEMA: Final = {
    "anyOf": [
        {"type": "string", "pattern": NAME_PATTERN},
        {"type": "array", "items": {"type": "string", "pattern": NAME_PATTERN}, "maxItems": 64},
    ]
}
HostNames = Annotated[
    tuple[HostName, ...], BeforeValidator(_one_or_more), WithJsonSchema(_NAMES_SCHEMA), Field(max_length=64)
]


def _groups(raw: Any) -> Any:
    """Return each entry as a tuple of hosts: one, or those that an instance spans."""
    entries = _one_or_more(raw)
    return tuple((entry,) if isinstance(entry, str) else as_tuple(entry) for entry in entries)


_GROUPS_SCHEMA: Final = {
    "anyOf": [
        {"type": "string", "pattern": NAME_PATTERN},
        {
            "type": "array",
            "items": {
                "anyOf": [
                    {"type": "string", "pattern": NAME_PATTERN},
                    {"type": "array", "items": {"type": "string", "pattern": NAME_PATTERN}, "maxItems": 64},
                ]
            },
            "maxItems": 64,
        },
    ]
}
HostGroup = Annotated[tuple[HostName, ...], Field(min_length=1, max_length=64)]
HostGroups = Annotated[
    tuple[HostGroup, ...], BeforeValidator(_groups), WithJsonSchema(_GROUPS_SCHEMA), Field(max_length=64)
]
NODE: Final = "-node"
"""Suffix before the number of a process on the second or a later host of an instance."""


class Ssh(Section):
    """Access to a host by ssh; defaults are those of the ssh command, with ~/.ssh/config."""

    host: str = Field(
        "", max_length=253, pattern=_TEXT, description="name or address; by default the host's own name"
    )
    port: int | None = Field(None, ge=1, le=65_535, description="port of its sshd; by default 22")
    user: str = Field(
        "", max_length=64, pattern=_TEXT, description="user name there; by default the local one"
    )
    key: PathText = Field("", description="file of the private key")
    known_hosts: PathText = Field(
        "", description="file of known host keys, by default ~/.ssh/known_hosts; keys are always verified"
    )
    config: PathText = Field("", description="file to read in place of ~/.ssh/config")
    connect_timeout_s: float = Field(10.0, gt=0, le=600, description="deadline of the connection")


class RemoteHost(Section):
    address: str = Field(
        pattern=ADDRESS,
        description="address on the data network: its servers listen there and are reached there",
    )
    ssh: Ssh = Field(default_factory=Ssh, description="how it is reached by ssh")
    python: PathText = Field(
        "", description="Python there with kvbench; by default that of `kvbench hosts install`, else python3"
    )
    workdir: PathText = Field("~/.cache/kvbench", description="folder there for files of a run")
    env: dict[EnvName, str] = Field(
        default_factory=dict, description="environment of all processes there, passed unchanged"
    )
    nics: Several[str] = Field((), max_length=64, description="NICs for KV, set for UCX, NCCL and gloo")
    devices: Several[int] = Field(
        (),
        max_length=64,
        description="its GPUs, given to its instances in turn, as many to each as it has ranks; by default "
        "all that its agent sees",
    )


class Roles(Section):
    """Hosts of each role: a name, or a list from which instances are assigned in turn.

    Prefill, decode and aggregated instances may span hosts; then a list of names replaces a name."""

    prefill: HostGroups = Field(
        (), description="hosts of prefill instances; an inner list: hosts of one instance"
    )
    decode: HostGroups = Field((), description="hosts of the decode instances")
    aggregated: HostGroups = Field(
        (), description="hosts of the engines without P/D; by default those of prefill and decode"
    )
    router: HostNames = Field((), description="host of the router and of helpers; by default prefill's first")
    loadgen: HostNames = Field((), description="host of the load generator; by default the router's")

    def groups(self, role: str) -> tuple[tuple[str, ...], ...]:
        """Return the hosts of a role's instances, or of the role that replaces it."""
        hosts: tuple[Any, ...] = getattr(self, role, ())
        if hosts:
            return tuple((group,) if isinstance(group, str) else tuple(group) for group in hosts)
        if role == "loadgen":
            return self.groups("router")
        if role in ("prefill", "decode"):
            return ()
        first = (self.prefill or self.decode or tuple((name,) for name in self.loadgen))[:1]
        if role == "aggregated":
            return (*self.groups("prefill"), *self.groups("decode")) or first
        return tuple(group[:1] for group in first)

    def of(self, role: str) -> tuple[str, ...]:
        """Return all hosts of a role in order."""
        return tuple(name for group in self.groups(role) for name in group)

    def nodes(self, process: str) -> tuple[str, ...]:
        """Return the hosts that an instance spans; helpers run with the router."""
        role, _, end = process.partition("-")
        groups = self.groups(role) or self.groups("router")
        if role == "loadgen":  # its name ends in the worker's number, if there are several
            end = process.rpartition("-w")[2]
        end = end.partition(NODE)[0]
        return groups[int(end) % len(groups)] if end.isdecimal() else groups[0]

    def host_of(self, process: str) -> str:
        """Return a process's host; ``decode-1-node1`` is a process on an instance's second host."""
        number = process.rpartition(NODE)[2] if NODE in process else "0"
        return self.nodes(process)[int(number)]


Word = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f\x7f]*$")]
SCHEDULED_ROLES: Final = ("prefill", "decode", "router", "loadgen")
_VALUE: Final = r"^[^\x00-\x20\x7f]{0,512}$"
_RESERVED: Final = ("--job-name", "-J", "--no-shell", "--jobid", "--het-group", "--wait", "-W", "--begin")
_VARIABLE: Final = r"^[A-Za-z_][A-Za-z0-9_]*$"
Variable = Annotated[str, Field(pattern=_VARIABLE)]


class _Equipped(Section):
    """Equipment of a node that its processes use."""

    nics: Several[Word] = Field((), max_length=64, description="the nodes' NICs for KV")
    devices: Several[int] = Field(
        (),
        max_length=64,
        description="the nodes' GPUs, given to instances in turn, as many to each as it has ranks; "
        "by default those that the scheduler made visible",
    )


class SlurmNodes(_Equipped):
    """Node selection: each key is the ``salloc`` option of that name. Empty: the cluster's default."""

    nodes: int | None = Field(None, ge=1, le=512, description="how many nodes")
    partition: str = Field("", pattern=_VALUE, description="the queue")
    account: str = Field("", pattern=_VALUE, description="who is charged")
    qos: str = Field("", pattern=_VALUE, description="quality of service")
    reservation: str = Field("", pattern=_VALUE, description="a reservation to use")
    constraint: str = Field("", pattern=_VALUE, description="features that the nodes must have")
    gres: str = Field("", pattern=_VALUE, description="generic resources of each node, such as gpu:8")
    nodelist: str = Field("", pattern=_VALUE, description="these nodes and no others")
    exclude: str = Field("", pattern=_VALUE, description="not these nodes")
    mem: str = Field("", pattern=_VALUE, description="memory of each node, such as 64G; 0: all of it")
    cpus_per_task: int | None = Field(None, ge=1, le=4096, description="CPU cores of each node")
    exclusive: bool = Field(False, description="no other job on the same nodes")
    extra: Several[Word] = Field(
        (), max_length=64, description="further options of salloc, one per entry, such as --switches=1"
    )

    @field_validator("extra")
    @classmethod
    def _not_ours(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        for word in words:
            if not word.startswith("-") or word == "--":
                raise custom(f"each must be an option with its value, as --name=value, unlike {word!r}")
            if word.split("=")[0] in _RESERVED:
                raise custom(f"{word.split('=')[0]} is set by kvbench itself")
        return words


class SlurmOptions(SlurmNodes):
    """A Slurm allocation, with requirements for each role's nodes."""

    time: str = Field(
        "02:00:00",
        pattern=r"^[0-9]+(-[0-9]+)?(:[0-9]+){0,2}$",
        description="the job's time limit: minutes, HH:MM:SS or D-HH; Slurm then ends it in any case",
    )
    job: str = Field(
        "",
        pattern=r"^[0-9]*$",
        description="existing allocation, which is not cancelled; by default SLURM_JOB_ID's, else a new one",
    )
    prefill: SlurmNodes | None = Field(None, description="nodes of the prefill instances, if they differ")
    decode: SlurmNodes | None = Field(None, description="nodes of the decode instances, if they differ")
    router: SlurmNodes | None = Field(
        None, description="node of the router; by default the first of prefill's"
    )
    loadgen: SlurmNodes | None = Field(
        None, description="nodes of the load generator; by default the router's"
    )
    python: str = Field("", max_length=4096, description="the interpreter on the nodes; by default this one")
    workdir: str = Field("", max_length=4096, description="folder on the nodes for files of a run")
    env: Several[Variable] = Field(
        (),
        max_length=200,
        description="environment variables passed to the nodes, besides PATH and similar ones",
    )
    pending_timeout_s: float = Field(
        3600.0, gt=0, le=7 * 86_400, description="longest wait in the queue; then the job is cancelled"
    )

    @model_validator(mode="after")
    def _both_or_neither(self) -> SlurmOptions:
        if (self.prefill is None) != (self.decode is None):
            raise custom("prefill and decode: give both, or neither and the number of nodes")
        return self


class RayNodes(_Equipped):
    """Requirements for a role's Ray node."""

    resources: dict[Annotated[str, Field(min_length=1, max_length=200)], float] = Field(
        default_factory=dict, description="custom resources and the amount of each"
    )
    labels: dict[Annotated[str, Field(min_length=1, max_length=200)], str] = Field(
        default_factory=dict, description="labels that the node must have, with their values"
    )
    num_cpus: float = Field(1.0, ge=0, le=4096, description="CPU cores that Ray sets aside")
    num_gpus: float = Field(0.0, ge=0, le=1024, description="GPUs that Ray sets aside and makes visible")
    nodes: int = Field(1, ge=1, le=512, description="how many nodes")

    @field_validator("resources")
    @classmethod
    def _positive(cls, resources: dict[str, float]) -> dict[str, float]:
        for name, amount in resources.items():
            if amount <= 0:
                raise custom(f"{name} must be more than 0, not {amount:g}")
            if re.fullmatch(r"(?i)cpu|gpu", name):
                raise custom(f"{name} is requested by num_{name.lower()}s")
        return resources


class RayOptions(Section):
    """A running Ray cluster, with requirements for each role's nodes."""

    address: str = Field(
        "auto",
        max_length=300,
        pattern=r"^[^\x00-\x20\x7f]+$",
        description="the cluster's address as HOST:PORT; auto: the one that runs here, or RAY_ADDRESS's",
    )
    prefill: RayNodes = Field(default_factory=RayNodes, description="nodes of the prefill instances")
    decode: RayNodes = Field(default_factory=RayNodes, description="nodes of the decode instances")
    router: RayNodes | None = Field(None, description="node of the router; by default the first of prefill's")
    loadgen: RayNodes | None = Field(None, description="nodes of the load generator; by default the router's")
    spread: bool = Field(
        True, description="place each on a separate node; false: as close together as possible"
    )
    wait_s: float = Field(
        120.0, gt=0, le=7 * 86_400, description="longest wait until the cluster has the requested nodes"
    )
    python: str = Field(
        "", max_length=4096, description="the interpreter of the agents; by default the workers'"
    )
    workdir: str = Field("", max_length=4096, description="folder on the nodes for files of a run")
    env: dict[Variable, str] = Field(
        default_factory=dict, description="environment variables that all processes there get"
    )
