"""The scenario's sections on schedulers: what is asked of Slurm, and of Ray. Pure."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import Field, field_validator, model_validator

from kvbench.core.scenario.base import Section, as_tuple, custom

Word = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f\x7f]*$")]
SCHEDULED_ROLES: Final = ("prefill", "decode", "router", "loadgen")
_VALUE: Final = r"^[^\x00-\x20\x7f]{0,512}$"
_OWN: Final = ("--job-name", "-J", "--no-shell", "--jobid", "--het-group", "--wait", "-W", "--begin")
_VARIABLE: Final = r"^[A-Za-z_][A-Za-z0-9_]*$"
Variable = Annotated[str, Field(pattern=_VARIABLE)]


class _Equipped(Section):
    """What of its equipment a node's processes use."""

    nics: tuple[Word, ...] = Field((), max_length=64, description="the nodes' NICs for KV")
    devices: tuple[int, ...] = Field(
        (),
        max_length=64,
        description="the nodes' GPUs, given to instances in turn, as many to each as it has ranks; "
        "by default those that the scheduler made visible",
    )

    @field_validator("nics", "devices", mode="before")
    @classmethod
    def _equipment_as_tuple(cls, raw: object) -> object:
        return as_tuple(raw)


class SlurmNodes(_Equipped):
    """Which nodes: each key is the ``salloc`` option of that name. Empty: the cluster's default."""

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
    extra: tuple[Word, ...] = Field(
        (), max_length=64, description="further options of salloc, a word each, such as --switches=1"
    )

    @field_validator("extra", mode="before")
    @classmethod
    def _as_tuple(cls, raw: object) -> object:
        return as_tuple(raw)

    @field_validator("extra")
    @classmethod
    def _not_ours(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        for word in words:
            if not word.startswith("-") or word == "--":
                raise custom(f"each must be an option with its value, as --name=value, unlike {word!r}")
            if word.split("=")[0] in _OWN:
                raise custom(f"{word.split('=')[0]} is set by kvbench itself")
        return words


class SlurmOptions(SlurmNodes):
    """An allocation of Slurm, with what each role's nodes must have."""

    time: str = Field(
        "02:00:00",
        pattern=r"^[0-9]+(-[0-9]+)?(:[0-9]+){0,2}$",
        description="the job's time limit: minutes, HH:MM:SS or D-HH; the last owner should all else fail",
    )
    job: str = Field(
        "",
        pattern=r"^[0-9]*$",
        description="an allocation that exists, and stays; by default SLURM_JOB_ID's, else a new one",
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
    env: tuple[Variable, ...] = Field(
        (),
        max_length=200,
        description="environment variables taken along; no others but PATH and the like are",
    )
    pending_timeout_s: float = Field(
        3600.0, gt=0, le=7 * 86_400, description="longest wait in the queue; then the job is cancelled"
    )

    @field_validator("env", mode="before")
    @classmethod
    def _env_as_tuple(cls, raw: object) -> object:
        return as_tuple(raw)

    @model_validator(mode="after")
    def _both_or_neither(self) -> SlurmOptions:
        if (self.prefill is None) != (self.decode is None):
            raise custom("prefill and decode: give both, or neither and the number of nodes")
        return self


class RayNodes(_Equipped):
    """What the Ray node of a role must have."""

    resources: dict[Annotated[str, Field(min_length=1, max_length=200)], float] = Field(
        default_factory=dict, description="custom resources and how much of each is taken"
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
                raise custom(f"{name} is asked for with num_{name.lower()}s")
        return resources


class RayOptions(Section):
    """A running Ray cluster, and what the nodes of each role must have."""

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
    spread: bool = Field(True, description="each of these on a node of its own; false: as close as may be")
    wait_s: float = Field(
        120.0, gt=0, le=7 * 86_400, description="longest wait for the cluster to have what is asked for"
    )
    python: str = Field(
        "", max_length=4096, description="the interpreter of the agents; by default the workers'"
    )
    workdir: str = Field("", max_length=4096, description="folder on the nodes for files of a run")
    env: dict[Variable, str] = Field(
        default_factory=dict, description="environment variables that all processes there get"
    )
