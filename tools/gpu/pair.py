"""The emulated pair through the product itself: ``kvbench bench``, its KV in host memory or on the GPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from kvbench import transfer
from tools.gpu.result import CheckFailedError, Figures, SkippedError

NEEDED: Final = ("pandas", "pyarrow", "httptools", "uvloop", "prometheus_client", "jinja2", "typer", "rich")
DEADLINE_S: Final = 100.0
RATE: Final = 10
SCENARIO: Final = """\
version: 1
model: tiny
deployment:
  engine: emulated
  base_port: 0
  ready_timeout_s: 40
  engine_options: {{timing: quick, memory: {memory}}}
connectors:
  - aggregated
  - {{name: nixl, ucx_tls: "{tls}"}}
workload: {{input_len: 1024, output_len: 16}}
slo: {{ttft_ms: 2000, tpot_ms: 200, attainment: 0.9}}
search: {{trial_s: 4, min_requests: 20}}
seed: 1
"""
COUNTS: Final = ("kv_bytes_per_request", "kv_transfers", "kv_transfer_ms_per_request", "kv_transfer_failures")


def pair(memory: str, tls: str, folder: Path) -> Figures:
    """A rate that any machine holds, once as one server and once as a pair: the same outputs, KV counted.

    Raises CheckFailedError with the trial's verdict and reason, or what the command said; SkippedError.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SkippedError(f"not installed: {', '.join(missing)}")
    if problem := transfer.check("nixl"):
        raise SkippedError(f"nixl: {problem.reason}")
    scenario = folder / "pair.yaml"
    scenario.write_text(SCENARIO.format(memory=memory, tls=tls))
    words = ["bench", str(scenario), "--rate", str(RATE), "--output", str(folder / "results")]
    done = subprocess.run(
        [sys.executable, "-m", "kvbench.cli", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=DEADLINE_S,
        check=False,
    )
    trials = {each["cell"]["connector"]: each for each in _trials(folder / "results")}  # the last of each
    figures: dict[str, Any] = {"exit code": done.returncode}
    if "nixl" not in trials:
        raise CheckFailedError(f"no trial of nixl was written:\n{done.stdout[-3000:]}", figures)
    trial = trials["nixl"]
    engine = trial.get("engine") or {}
    figures |= {
        "verdict": trial["verdict"],
        "reason": trial.get("reason", ""),
        "labels": trial.get("labels", []),
        "findings": [f"{each['gate']}: {each['message']}" for each in trial.get("findings", [])],
        **{name: engine[name] for name in COUNTS if name in engine},
    }
    if trial["verdict"] != "met":
        raise CheckFailedError(f"nixl's trial is {trial['verdict']}: {trial.get('reason', '')}", figures)
    return figures


def _trials(folder: Path) -> list[dict[str, Any]]:
    found = sorted(folder.glob("*/trials.jsonl"))
    return [json.loads(line) for path in found for line in path.read_text().splitlines()]
