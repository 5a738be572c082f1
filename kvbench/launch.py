"""``kvbench launch``: bring one deployment up and keep it until Ctrl-C."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from kvbench import connectors, engines
from kvbench.core.plan import DeploymentPlan, Plan
from kvbench.deployment import Deployment, usable, with_ports
from kvbench.errors import EXIT_OK, InputError, MissingLibraryError
from kvbench.launchers.local import LocalLauncher
from kvbench.planning import plan_of
from kvbench.request import Wish, resolve

WATCH_S = 0.2


def command(scenario_name: str, connector: str | None, overrides: Sequence[str], console: Console) -> int:
    """Print the URLs once everything is ready, then wait. Raises ProcessDiedError if a process ends."""
    wish = Wish(scenario_name, tuple(overrides), (connector,) if connector else ())
    scenario, _ = resolve(wish)
    planned = with_ports(_chosen(plan_of(scenario)), scenario.deployment.host)
    problem = usable(engines.get(scenario.deployment.engine), connectors.get(planned.connector))
    if problem is not None:
        raise MissingLibraryError(f"{planned.connector} cannot run here: {problem.reason}", hint=problem.fix)
    folder = Path(tempfile.mkdtemp(prefix="kvbench-launch-"))
    launcher = LocalLauncher(f"launch-{secrets.token_hex(4)}", folder / "logs", folder / "specs")
    with Deployment(scenario, planned, launcher) as deployment:
        console.print(f"ready after {deployment.ready_s:.2f} s: {planned.label}", markup=False)
        console.print(f"  requests  {deployment.endpoints.base_url}/v1/completions", markup=False)
        for name, url in deployment.endpoints.metrics_urls.items():
            console.print(f"  {name:<9} {url} (pid {deployment.pids()[name]})", markup=False)
        console.print(f"  logs      {launcher.log_dir}", markup=False)
        console.print("Ctrl-C stops it", markup=False)
        try:
            while True:
                deployment.check_alive()
                time.sleep(WATCH_S)
        except KeyboardInterrupt:
            console.print("stopping", markup=False)
    return EXIT_OK


def _chosen(plan: Plan) -> DeploymentPlan:
    """The first deployment that is not there for its reference outputs only."""
    for each in plan.deployments:
        if not each.reference_only:
            return each
    raise InputError("the scenario has no connector to launch")
