"""``kvbench ps`` and ``kvbench stop``: processes of runs, here and on the hosts of a scenario."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape

from kvbench.errors import EXIT_FAILED, EXIT_OK, InputError, KvbenchError
from kvbench.launchers.agents.fleet import Fleet
from kvbench.launchers.parts import tagged
from kvbench.launchers.placement.placement import fleet_of
from kvbench.planning.overrides import CliOptions, resolve

HERE = ""
MAX_COMMAND = 100


def ps(scenario: str | None, overrides: Sequence[str], console: Console) -> int:
    """List the processes of all runs; those of other hosts too if a scenario names them."""
    with _reached(scenario, overrides, console) as (fleet, failed):
        rows = list(_found(fleet))
    if not rows:
        console.print("no process of a run is left", markup=False)
    else:
        _print(rows, console)
    return EXIT_FAILED if failed else EXIT_OK


def stop(
    tag: str, scenario: str | None, overrides: Sequence[str], console: Console, *, everything: bool
) -> int:
    """End the processes of one run (its tag, or how it begins), or of all of them."""
    if bool(tag) == everything:
        raise InputError("say which run to stop, or --all", hint="`kvbench ps` lists them")
    with _reached(scenario, overrides, console) as (fleet, failed):
        rows = [row for row in _found(fleet) if everything or str(row["tag"]).startswith(tag)]
        for host in dict.fromkeys(row["host"] for row in rows):
            wanted = [(row["pid"], row["tag"]) for row in rows if row["host"] == host]
            ended = (
                tagged.end(wanted) if host == HERE else int(fleet[host].ask("end", wanted=wanted)["ended"])
            )
            console.print(f"{host or 'here'}: {ended} process(es) ended", markup=False)
    if not rows:
        console.print("no such process is left", markup=False)
    return EXIT_FAILED if failed else EXIT_OK


@contextmanager
def _reached(
    scenario: str | None, overrides: Sequence[str], console: Console
) -> Iterator[tuple[Fleet | dict[str, Any], bool]]:
    """Agents on those hosts of the scenario that can be reached, and whether any cannot."""
    if scenario is None:
        yield {}, False
        return
    wanted, _ = resolve(CliOptions(scenario, tuple(overrides)))
    if not wanted.deployment.hosts:
        yield {}, False
        return
    with fleet_of(wanted, f"ps-{secrets.token_hex(4)}") as fleet:
        failed = False
        try:
            fleet.require()
        except KvbenchError as error:
            console.print(f"not reached: {error.message}", markup=False, style="yellow")
            failed = True
        yield fleet, failed


def _found(fleet: Fleet | dict[str, Any]) -> Iterator[dict[str, Any]]:
    own = {fleet.run_tag} if isinstance(fleet, Fleet) else set()
    seen = set()
    for each in tagged.tagged(own):
        seen.add(each.pid)
        yield {"host": HERE, **each.to_json()}
    for name, agent in fleet.items():
        # An agent that sees this process is on this machine, and so are all that it lists.
        answer = agent.ask("tagged", but=sorted(own))
        for row in answer["found"]:
            if answer["boot_id"] != boot_id() or row["pid"] not in seen:
                yield {"host": name, **row}


def boot_id() -> str:
    """What distinguishes this boot of the machine from all others."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _print(rows: Sequence[dict[str, Any]], console: Console) -> None:
    from rich.table import Table

    table = Table("host", "pid", "age (s)", "run", "command", box=None, pad_edge=False)
    for row in rows:
        command = escape(str(row["command"])[:MAX_COMMAND])
        table.add_row(
            row["host"] or "here", str(row["pid"]), f"{row['age_s']:.0f}", escape(row["tag"]), command
        )
    console.print(table)
