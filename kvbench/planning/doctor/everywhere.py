"""``kvbench doctor`` as a whole: this machine, or a scenario and the machines that it will run on."""

from __future__ import annotations

from functools import partial

from rich.console import Console

from kvbench.planning.doctor import hosts as doctor_hosts
from kvbench.planning.doctor.doctor import (
    cpu_checks,
    examine,
    open_files_check,
    print_checks,
    python_check,
)
from kvbench.planning.doctor.scenario import command_of, examine_scenario, runs_where


def command(
    console: Console,
    scenario: str | None = None,
    overrides: tuple[str, ...] = (),
    *,
    as_json: bool = False,
) -> int:
    """Print every finding with its fix; 1 if something does not work without one.

    With a scenario its own findings come first, and then those of the machines where it will run: this one,
    or its hosts. Raises InputError or ScenarioError if it cannot be read.
    """
    say = partial(print_checks, console=console, as_json=as_json)
    if scenario is None:
        return say(examine())
    checks, where = examine_scenario(scenario, overrides), runs_where(scenario, overrides)
    if where == "here":
        return say(checks + examine(command_of(scenario, overrides)))
    if where == "server":  # only the client is this machine's
        return say([*checks, python_check(), open_files_check(), *cpu_checks()])
    if where == "later" or any(check.status == "missing" for check in checks):
        return say(checks)
    return doctor_hosts.command(scenario, overrides, console, as_json=as_json, before=checks)
