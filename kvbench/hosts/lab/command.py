"""The commands `kvbench lab`: up, exec, status, down, fault."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from rich.console import Console
from rich.markup import escape

from kvbench.core.fitted_table import Grid, columns_of
from kvbench.errors import InputError, LabError
from kvbench.hosts.lab import faults as labfaults
from kvbench.hosts.lab import state as labstate
from kvbench.hosts.lab.lab import Lab, interface_counters, take_down
from kvbench.hosts.lab.layout import SIDES, LabPlan
from kvbench.hosts.lab.state import LabState


def up(plan: LabPlan, console: Console, *, rootless: bool = False) -> None:
    """Create a lab that stays until `lab down`, and print how to use it."""
    lab = Lab.build(plan, stays=True, rootless=rootless)
    name = "" if plan.name == "kv" else f" --name {plan.name}"
    first, last = plan.address("A", 0), plan.address("A", plan.nics - 1)
    span = first if first == last else f"{first} to {last}"
    console.print(f"lab {plan.name}: {lab.describe()} between the hosts A and B")
    console.print(f"  A has {span}, B the same ending in .2; NICs nic0 to nic{plan.nics - 1}")
    console.print(
        f"  {lab.state.congestion}, bursts of {plan.burst_bytes // 1024} KiB (move much more at a time), "
        f"kernel {escape(lab.state.kernel)}"
    )
    for note in lab.state.notes:
        console.print(f"  note: {escape(note)}")
    console.print(f"  kvbench lab exec{name} A -- ip -statistics link", highlight=False)
    console.print(f"  kvbench lab down{name}", highlight=False)


def execute(side: str, command: Sequence[str], name: str) -> NoReturn:
    """Replace this process by a command inside a host of the lab."""
    if not command:
        raise InputError("no command given", hint="kvbench lab exec A -- ip address")
    words = [*Lab.standing(name).prefix(side), *command]
    sys.stdout.flush()
    os.execvp(words[0], words)


def down(name: str, console: Console, *, everything: bool = False) -> None:
    """Remove a lab with its processes, and leftovers of killed processes."""
    done = take_down(name, everything)
    console.print(f"taken down: {', '.join(done)}" if done else "there is no lab")


def fault(lab: Lab, fault: labstate.Fault, console: Console, *, heal: bool = False) -> None:
    """Plant or heal a fault and print its counter."""
    if heal:
        if fault.amount:
            raise InputError("--heal takes no --amount")
        done = labfaults.heal(lab, fault.kind, fault.nic)
    else:
        done = labfaults.place(lab, fault.kind, fault.nic, fault.amount)
    console.print(done.words())


def status(console: Console, *, as_json: bool = False) -> None:
    """Print every lab: its NICs, bytes, faults, user, and leftovers."""
    labs = [_row_of(state) for state in labstate.all_states()]
    lost = labstate.unrecorded()
    if as_json:
        sys.stdout.write(json.dumps({"labs": labs, "unrecorded": lost}, indent=2) + "\n")
        return
    if not labs and not lost:
        console.print("there is no lab; make one: kvbench lab up --nics 8 --rate 1gbit")
    for lab in labs:
        console.print(f"lab {lab['name']}: {lab['shape']}, {lab['congestion'] or '?'}, {escape(lab['use'])}")
        for line in (*lab["notes"], *lab["faults"]):
            console.print(f"  {escape(line)}")
        if lab["nics"]:
            fitted = _nics(lab["nics"]).fitted(console.width if console.is_terminal else None)
            console.print(fitted.text(), markup=False, soft_wrap=True)
    for name in lost:
        console.print(f"lab {name}: its namespaces exist, its file does not;  kvbench lab down --name {name}")


def _row_of(state: LabState) -> dict[str, Any]:
    plan = state.plan
    row: dict[str, Any] = {
        "name": plan.name,
        "shape": plan.describe(),
        "line_rate_gb_per_s": plan.line_rate_gb_per_s,
        "burst_bytes": plan.burst_bytes,
        "congestion": state.congestion,
        "kernel": state.kernel,
        "standing": state.standing,
        "use": _use(state),
        "rootless": any(host.holder for host in state.hosts.values()),
        "notes": state.notes,
        "faults": [],
        "processes": {side: host.processes() for side, host in state.hosts.items()},
        "nics": [],
    }
    if state.standing:
        row["faults"] = [_fault_words(state, fault) for fault in state.faults]
        counted = {side: interface_counters(state.hosts[side]) for side in SIDES}
        row["nics"] = [
            {
                "nic": nic,
                **{side: plan.address(side, nic) for side in SIDES},
                "sent_a": counted["A"][plan.interface(nic)]["sent"],
                "sent_b": counted["B"][plan.interface(nic)]["sent"],
            }
            for nic in range(plan.nics)
        ]
    return row


def _fault_words(state: LabState, fault: labstate.Fault) -> str:
    try:
        return labfaults.report(Lab(state), fault).words()
    except LabError as error:
        return f"{fault.kind} on nic{fault.nic}: {error.message}"


def _use(state: LabState) -> str:
    running = sum(len(host.processes()) for host in state.hosts.values())
    if state.left_over and state.owner is None:
        return "its namespaces no longer exist; the next `lab up` or `lab down` removes its file"
    if state.left_over:
        return "left over from an ended process; the next `lab up` or `lab down` removes it"
    if state.owner is not None:
        return f"in use by process {state.owner.pid}"
    return f"up since {state.created_at}; {running} process{'es' if running != 1 else ''} inside"


def _nics(nics: Sequence[dict[str, Any]]) -> Grid:
    cells = [
        [f"nic{nic['nic']}", nic["A"], nic["B"], *(f"{nic[way] / 1e6:,.1f}" for way in ("sent_a", "sent_b"))]
        for nic in nics
    ]
    return Grid(columns_of("NIC|A|B", "A sent MB|B sent MB"), cells, ruled=False, indent="  ")
