"""What a process of a deployment is, before anybody starts it: plain data for plan.json and the launchers.

Modules that are processes, started as ``python -m NAME``, are named here and nowhere else.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

RUN_TAG_ENV = "KVBENCH_RUN_TAG"
"""Environment variable that marks every process a run has started, so that none is ever orphaned."""

ONE_THREAD_ENV: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Keeps numerical libraries from starting a thread for each core."""

PROXIES: Final = ("http_proxy", "https_proxy", "all_proxy")
"""What HTTP libraries take a proxy from, in lower and in upper case."""
NO_PROXIES: Final = ("no_proxy", "NO_PROXY")
"""Kept alike: libcurl and Python read the lower case first, some read the upper case alone."""


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
    """Environment variable → content of a JSON file whose path it gets."""
    one_thread: bool = True
    """Numerical libraries get one thread each; an engine that computes chooses for itself."""
    host: str = ""
    """Where it is meant to run; only said in printed commands."""
    beside: tuple[str, ...] = ()
    """Addresses of its deployment, which it reaches without a proxy whatever the environment says."""

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


def unproxied(environment: Mapping[str, str], addresses: Sequence[str]) -> dict[str, str]:
    """``no_proxy`` and ``NO_PROXY`` for a process that is to reach ``addresses`` without a proxy.

    What they hold in ``environment`` stays in front. Empty where no proxy is set there, or every host is
    excepted already. Hosts are named singly, since httpx knows no ranges of addresses.
    """
    proxied = any(environment.get(name) or environment.get(name.upper()) for name in PROXIES)
    given = [word.strip() for name in NO_PROXIES for word in environment.get(name, "").split(",")]
    if not proxied or not addresses or "*" in given:
        return {}
    return dict.fromkeys(NO_PROXIES, ",".join(filter(None, dict.fromkeys([*given, *addresses]))))


def shell_script(spec: ProcessSpec) -> str:
    """The shell commands that start a process by hand in the current folder: its files, and one command."""
    where = f", on {spec.host}" if spec.host else ""
    lines = [f"# {spec.name}{where}"]
    env = {**(ONE_THREAD_ENV if spec.one_thread else {}), **spec.env}
    argv = list(spec.argv)
    for variable, content in spec.files.items():
        name = f"{spec.name}-{variable.lower()}.json"
        lines += _here_document(name, content)
        env[variable] = name
    if spec.spec is not None:
        lines += _here_document(f"{spec.name}.json", spec.spec)
        argv.append(f"{spec.name}.json")
    assignments = [f"{name}={shlex.quote(value)}" for name, value in env.items()]
    lines.append(" \\\n  ".join([*assignments, *_rows(argv)]))
    if spec.ready_url:
        lines.append(f"# ready when {spec.ready_url} answers 200")
    return "\n".join(lines)


def _here_document(name: str, content: Mapping[str, Any]) -> Iterator[str]:
    yield f"cat > {shlex.quote(name)} <<'EOF'"
    yield json.dumps(content, indent=1)  # a line of JSON is never the word that ends it
    yield "EOF"


def _rows(argv: Sequence[str]) -> list[str]:
    """The words of a command, quoted: a flag and its values on a line of their own."""
    rows: list[list[str]] = [[]]
    for word in argv:
        if word.startswith("--") and rows[-1]:
            rows.append([])
        rows[-1].append(shlex.quote(word))
    return [" ".join(row) for row in rows]


LOADGEN_MODULE: Final = "kvbench.processes.loadgen"
ROUTER_MODULE: Final = "kvbench.processes.router"
EMULATOR_MODULE: Final = "kvbench.processes.emulator"
EXACT_SERVER_MODULE: Final = "kvbench.processes.exact_server"
AGENT_MODULE: Final = "kvbench.processes.agent"
TRANSFER_CHILD_MODULE: Final = "kvbench.processes.transfer_worker.child"
TRANSFER_WORKER_MODULE: Final = "kvbench.processes.transfer_worker.worker"
