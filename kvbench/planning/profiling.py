"""What is put around an engine's command to see into it: a profiler before it, a file for its spans."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvbench.core.plan.processes import ProcessSpec
from kvbench.core.scenario.scenario import Deployment
from kvbench.errors import MissingLibraryError
from kvbench.processes.common.spans import SUFFIX

LOGS: Final = "{logs}"
NAME: Final = "{name}"
PROFILER_GRACE_S: Final = 60.0
"""A profiler writes its report after its program has ended, which takes tens of seconds for a big one."""

# --trace-fork-before-exec and --cuda-graph-trace=node: as vLLM's own page on profiling has them.
NSYS: Final = (
    "nsys",
    "profile",
    "--trace=cuda,nvtx",
    "--trace-fork-before-exec=true",
    "--cuda-graph-trace=node",
    "--sample=none",
    "--force-overwrite=true",
    f"--output={LOGS}/{NAME}",
)


def observed(spec: ProcessSpec, role: str, wanted: Deployment, log_dir: Path | None) -> ProcessSpec:
    """A process of a deployment with its role's prefix and a place for its spans, as the scenario asks.

    ``log_dir`` is None while only a plan is made: then ``{logs}`` stands for the folder.
    """
    folder = LOGS if log_dir is None else str(log_dir)
    if wanted.trace and spec.spec is not None:
        spec = replace(spec, spec={**spec.spec, "trace_path": f"{folder}/{spec.name}{SUFFIX}"})
    words: Sequence[str] = getattr(wanted.prefix, role, ())
    if not words:
        return spec
    prefix = tuple(word.replace(NAME, spec.name).replace(LOGS, folder) for word in words)
    profiled = Path(prefix[0]).name == NSYS[0]
    env = {**wanted.engine_options.profiler_env, **spec.env} if profiled else spec.env
    return replace(spec, argv=(*prefix, *spec.argv), env=env)


def nsys_override() -> str:
    """The ``--set`` that profiles every instance. Raises MissingLibraryError without nsys on this machine."""
    if shutil.which(NSYS[0]) is None:
        raise MissingLibraryError(
            "nsys is not installed here, or not on the PATH",
            hint="it comes with NVIDIA Nsight Systems; `kvbench timeline` needs none: deployment.trace=true",
        )
    words = {role: list(NSYS) for role in ("prefill", "decode", "aggregated")}
    return f"deployment.prefix={json.dumps(words)}"


def has_prefix(wanted: Deployment) -> bool:
    """Whether any instance is started by another program, which may need time to end."""
    return any(words for words in wanted.prefix.model_dump().values())
