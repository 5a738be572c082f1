"""The hosts of a scenario: how each is reached, where its servers listen, and which role runs on which."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, WithJsonSchema

from kvbench.core.scenario.base import NAME_PATTERN, Section, as_tuple

ADDRESS: Final = r"^[A-Za-z0-9][A-Za-z0-9.-]{0,252}$"
_TEXT: Final = r"^[^\x00\n]*$"

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
    """Each entry as a tuple of hosts: of one, or of those that an instance spans."""
    entries = _one_or_more(raw)
    return tuple((each,) if isinstance(each, str) else as_tuple(each) for each in entries)


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
"""Stands before the number of a process that is not the first of an instance over several hosts."""


class Ssh(Section):
    """How a host is reached by ssh; what is not said is as for the ssh command, ~/.ssh/config included."""

    host: str = Field(
        "", max_length=253, pattern=_TEXT, description="name or address; by default the host's own name"
    )
    port: int | None = Field(None, ge=1, le=65_535, description="port of its sshd; by default 22")
    user: str = Field("", max_length=64, pattern=_TEXT, description="user there; by default the one here")
    key: str = Field("", max_length=4096, pattern=_TEXT, description="file of the private key")
    known_hosts: str = Field(
        "",
        max_length=4096,
        pattern=_TEXT,
        description="file of the hosts' keys, by default ~/.ssh/known_hosts; it is always checked",
    )
    config: str = Field(
        "", max_length=4096, pattern=_TEXT, description="file to read in place of ~/.ssh/config"
    )
    connect_timeout_s: float = Field(10.0, gt=0, le=600, description="deadline of the connection")


class FarHost(Section):
    """One host that processes run on."""

    address: str = Field(
        pattern=ADDRESS,
        description="address on the data network: its servers listen there and are found there",
    )
    ssh: Ssh = Field(default_factory=Ssh, description="how it is reached by ssh")
    python: str = Field(
        "",
        max_length=4096,
        pattern=_TEXT,
        description="a Python there that has kvbench; by default `kvbench hosts install`'s, else python3",
    )
    workdir: str = Field(
        "~/.cache/kvbench", max_length=4096, pattern=_TEXT, description="folder there for files of a run"
    )
    env: dict[EnvName, str] = Field(
        default_factory=dict, description="environment of all processes there, word for word"
    )
    nics: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = Field(
        (), max_length=64, description="its NICs for KV; UCX, NCCL and gloo are told to use them"
    )
    devices: Annotated[tuple[int, ...], BeforeValidator(as_tuple)] = Field(
        (),
        max_length=64,
        description="its GPUs, given to its instances in turn, as many to each as it has ranks; by default "
        "all that its agent sees",
    )


class Roles(Section):
    """On which hosts a role runs: a name, or a list that its instances are dealt out to in turn.

    An instance of prefill, decode or aggregated may span hosts: then a list of names stands for one name.
    """

    prefill: HostGroups = Field((), description="hosts of the prefill instances; a list in the list: of one")
    decode: HostGroups = Field((), description="hosts of the decode instances")
    aggregated: HostGroups = Field(
        (), description="hosts of the engines without P/D; by default those of prefill and decode"
    )
    router: HostNames = Field((), description="host of the router and of helpers; by default prefill's first")
    loadgen: HostNames = Field((), description="host of the load generator; by default the router's")

    def groups(self, role: str) -> tuple[tuple[str, ...], ...]:
        """The hosts of a role's instances, with what stands in where nothing was said."""
        own: tuple[Any, ...] = getattr(self, role, ())
        if own:
            return tuple((each,) if isinstance(each, str) else tuple(each) for each in own)
        if role == "loadgen":
            return self.groups("router")
        if role in ("prefill", "decode"):
            return ()
        first = (self.prefill or self.decode or tuple((each,) for each in self.loadgen))[:1]
        if role == "aggregated":
            return (*self.groups("prefill"), *self.groups("decode")) or first
        return tuple(each[:1] for each in first)

    def of(self, role: str) -> tuple[str, ...]:
        """All hosts of a role, in their order."""
        return tuple(name for group in self.groups(role) for name in group)

    def nodes(self, process: str) -> tuple[str, ...]:
        """The hosts that an instance spans, by its name; helpers are with the router."""
        role, _, end = process.partition("-")
        groups = self.groups(role) or self.groups("router")
        if role == "loadgen":  # its name ends in the worker's number, if there are several
            end = process.rpartition("-w")[2]
        end = end.partition(NODE)[0]
        return groups[int(end) % len(groups)] if end.isdecimal() else groups[0]

    def host_of(self, process: str) -> str:
        """The host of a process by its name, such as ``decode-1``, or ``decode-1-node1`` of several."""
        number = process.rpartition(NODE)[2] if NODE in process else "0"
        return self.nodes(process)[int(number)]
