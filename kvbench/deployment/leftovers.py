"""``kvbench ps`` and ``kvbench stop``: processes of runs, here and on the hosts of a scenario."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from kvbench.core.fitted_table import FittedColumn, Grid, columns_of
from kvbench.errors import EXIT_FAILED, EXIT_OK, InputError, KvbenchError
from kvbench.hosts import scratch
from kvbench.launchers.agents.fleet import Fleet
from kvbench.launchers.parts import tagged
from kvbench.launchers.placement.placement import fleet_of
from kvbench.planning.overrides import CliOptions, resolve

HERE = ""
MAX_COMMAND = 100


def ps(scenario: str | None, overrides: Sequence[str], console: Console, *, as_json: bool = False) -> int:
    """List the processes of all runs; those of other hosts too if a scenario names them."""
    with _reached(scenario, overrides, console) as (fleet, failed):
        rows = list(_found(fleet))
    if as_json:
        console.file.write(json.dumps({"processes": rows}, indent=2) + "\n")
    elif not rows:
        console.print("no process of a run is left", markup=False)
    else:
        _print(rows, console)
    return EXIT_FAILED if failed else EXIT_OK


def stop(
    tag: str, scenario: str | None, overrides: Sequence[str], console: Console, *, everything: bool
) -> int:
    """End the processes of one run (its tag, or how it begins), or of all of them, and remove the temporary
    folders that such runs left here.
    """
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
    # Those of processes that have just ended are among them.
    folders = [folder for folder, whose in scratch.left() if everything or (whose and whose.startswith(tag))]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        console.print(f"here: {folder} removed", markup=False)
    if not rows and not folders:
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
    cells = [
        [
            row["tag"],
            row["host"] or "here",
            f"{row['pid']}",
            f"{row['age_s']:.0f}",
            row["command"][:MAX_COMMAND],
        ]
        for row in rows
    ]
    columns = [*columns_of("run|host", "pid|age (s)"), FittedColumn("command", "left", rank=1)]
    fitted = Grid(columns, cells, ruled=False).fitted(console.width if console.is_terminal else None)
    console.print(fitted.text(), markup=False, soft_wrap=True)
