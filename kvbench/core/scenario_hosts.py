"""The hosts of a scenario: how each is reached, where its servers listen, and which role runs on which."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, WithJsonSchema

from kvbench.core.scenario_base import NAME_PATTERN, Section, as_tuple

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
        description="its GPUs, given to its instances in turn, tensor_parallel_size to each",
    )


class Roles(Section):
    """On which hosts a role runs: a name, or a list that its instances are dealt out to in turn."""

    prefill: HostNames = Field((), description="hosts of the prefill instances")
    decode: HostNames = Field((), description="hosts of the decode instances")
    aggregated: HostNames = Field((), description="host of a server without P/D; by default prefill's first")
    router: HostNames = Field((), description="host of the router and of helpers; by default prefill's first")
    loadgen: HostNames = Field((), description="host of the load generator; by default the router's")

    def of(self, role: str) -> tuple[str, ...]:
        """The hosts of a role, with what stands in where nothing was said."""
        own: tuple[str, ...] = getattr(self, role, ())
        if own:
            return own
        if role == "loadgen":
            return self.of("router")
        if role in ("prefill", "decode"):
            return ()
        return (self.prefill or self.decode or self.loadgen)[:1]

    def host_of(self, process: str) -> str:
        """The host of a process by its name, such as ``decode-1``; helpers are with the router."""
        role, _, end = process.partition("-")
        hosts = self.of(role) or self.of("router")
        if role == "loadgen":  # its name ends in the worker's number, if there are several
            end = process.rpartition("-w")[2]
        return hosts[int(end) % len(hosts)] if end.isdecimal() else hosts[0]
