"""Description of a deployment's process: plain data for plan.json and the launchers.

The modules that are processes (``python -m NAME``) are named only here."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

RUN_TAG_ENV = "KVBENCH_RUN_TAG"
"""Environment variable that marks every process of a run, so that leftovers are found."""

ONE_THREAD_ENV: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Environment that keeps numerical libraries from starting one thread per core."""

PROXIES: Final = ("http_proxy", "https_proxy", "all_proxy")
"""Proxy variables of HTTP libraries, in lower and in upper case."""
NO_PROXIES: Final = ("no_proxy", "NO_PROXY")
"""Both are set: libcurl and Python prefer the lower case, other libraries read only the upper case."""


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start. ``spec`` becomes a JSON file whose path is the last argument."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    spec: Mapping[str, Any] | None = None
    ready_url: str = ""
    port: int = 0
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Environment variable → content of the JSON file whose path it gets."""
    one_thread: bool = True
    """Numerical libraries get one thread each; an engine that computes chooses for itself."""
    host: str = ""
    """Address of its host, for printing."""
    nics: tuple[str, ...] = ()
    """NICs for KV, looked up on its host (``nic_env``); for printing."""
    beside: tuple[str, ...] = ()
    """Addresses of its deployment, reached without a proxy."""

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "argv": list(self.argv),
            "env": dict(self.env),
            "spec": dict(self.spec) if self.spec is not None else None,
            "ready_url": self.ready_url,
            **(
                {"files": {name: dict(content) for name, content in self.files.items()}} if self.files else {}
            ),
        }

    def printed(self) -> dict[str, Any]:
        """Return the spec as shown to the user, with its host, whose sysfs selects the ``nic_env``."""
        kinds = {"rdma": nic_env(self.nics, rdma=True), "interfaces": nic_env(self.nics, rdma=False)}
        return {
            **self.to_json(),
            **({"host": self.host} if self.host else {}),
            **({"nics": list(self.nics), "nic_env": kinds} if self.nics else {}),
        }


def nic_env(names: Sequence[str], *, rdma: bool) -> dict[str, str]:
    """Return the environment that makes UCX, NCCL and gloo use a host's NICs: RDMA devices or interfaces.
    NCCL takes names for beginnings of names unless they follow an equals sign."""
    if not names:
        return {}
    if not rdma:
        whole = ",".join(names)
        return {"UCX_NET_DEVICES": whole, "NCCL_SOCKET_IFNAME": f"={whole}", "GLOO_SOCKET_IFNAME": whole}
    ports = [name if ":" in name else f"{name}:1" for name in names]
    return {"UCX_NET_DEVICES": ",".join(ports), "NCCL_IB_HCA": f"={','.join(names)}"}


def unproxied(environment: Mapping[str, str], addresses: Sequence[str]) -> dict[str, str]:
    """Return ``no_proxy`` and ``NO_PROXY`` with ``addresses`` appended; empty where no proxy applies. Hosts
    are listed one by one because httpx knows no address ranges."""
    proxied = any(environment.get(name) or environment.get(name.upper()) for name in PROXIES)
    given = [word.strip() for name in NO_PROXIES for word in environment.get(name, "").split(",")]
    if not proxied or not addresses or "*" in given:
        return {}
    return dict.fromkeys(NO_PROXIES, ",".join(filter(None, dict.fromkeys([*given, *addresses]))))


_CODE: Final = "KVBENCH_CODE"
_FIND_CODE: Final = "import os, kvbench; print(os.path.dirname(os.path.dirname(kvbench.__file__)))"


def in_code(code: str) -> re.Pattern[str]:
    """Match the folder that kvbench is imported from, where it or the package in it is named; a host has none
    of the folder's other files, nor of folders whose names only begin alike."""
    return re.compile(rf"(?<![\w./-]){re.escape(code)}(?=/kvbench(?![\w.-])|[:,;\s\"']|$)")


def shell_script(spec: ProcessSpec, code: str = "") -> str:
    """Return shell commands that start a process in the current folder: its files, and one command. ``code``:
    local folder that kvbench is imported from; the process's host finds its own copy."""
    where = f", on {spec.host}" if spec.host else ""
    lines = [f"# {spec.name}{where}"]
    if spec.nics:
        lines += _nic_lines(spec.nics)

    local = in_code(code) if code else None

    def quoted(word: str) -> str:
        parts = local.split(word) if local else [word]
        return f'"${_CODE}"'.join(shlex.quote(part) if part or len(parts) == 1 else "" for part in parts)

    if local and any(local.search(word) for word in (*spec.argv, *spec.env.values())):
        lines.append(f"{_CODE}=$(python3 -c {shlex.quote(_FIND_CODE)})")
    env = {**(ONE_THREAD_ENV if spec.one_thread else {}), **spec.env}
    argv = list(spec.argv)
    for variable, content in spec.files.items():
        name = f"{spec.name}-{variable.lower()}.json"
        lines += _here_document(name, content)
        env[variable] = name
    if spec.spec is not None:
        lines += _here_document(f"{spec.name}.json", spec.spec)
        argv.append(f"{spec.name}.json")
    assignments = [f"{name}={quoted(value)}" for name, value in env.items()]
    lines.append(" \\\n  ".join([*assignments, *_rows([quoted(word) for word in argv])]))
    if spec.ready_url:
        lines.append(f"# ready when {spec.ready_url} answers 200")
    return "\n".join(lines)


def _nic_lines(names: Sequence[str]) -> Iterator[str]:
    """Yield shell lines that choose the NIC variables by the host's sysfs, as its agent does."""
    there = " && ".join(
        f"[ -e /sys/class/infiniband/{shlex.quote(name.partition(':')[0])} ]" for name in names
    )
    for words, rdma in ((f"if {there}", True), ("else", False)):
        env = " ".join(f"{name}={shlex.quote(value)}" for name, value in nic_env(names, rdma=rdma).items())
        yield f"{words}; then export {env}" if rdma else f"{words} export {env}; fi"


def _here_document(name: str, content: Mapping[str, Any]) -> Iterator[str]:
    yield f"cat > {shlex.quote(name)} <<'EOF'"
    yield json.dumps(content, indent=1)  # a line of JSON never equals the word that ends it
    yield "EOF"


def _rows(argv: Sequence[str]) -> list[str]:
    """Return the quoted parts of a command, one line for each flag with its values."""
    rows: list[list[str]] = [[]]
    for word in argv:
        if word.startswith("--") and rows[-1]:
            rows.append([])
        rows[-1].append(word)
    return [" ".join(row) for row in rows]


LOADGEN_MODULE: Final = "kvbench.processes.loadgen"
ROUTER_MODULE: Final = "kvbench.processes.router"
EMULATOR_MODULE: Final = "kvbench.processes.emulator"
EXACT_SERVER_MODULE: Final = "kvbench.processes.exact_server"
AGENT_MODULE: Final = "kvbench.processes.agent"
TRANSFER_CHILD_MODULE: Final = "kvbench.processes.transfer_worker.child"
TRANSFER_WORKER_MODULE: Final = "kvbench.processes.transfer_worker.worker"
