"""What a resumed sweep needs from its run folder, and whether conditions have changed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvbench.core.records import Cell, Method, TrialRecord
from kvbench.errors import StoreError
from kvbench.results.run import CELLS, CellResult, RunFolder

if TYPE_CHECKING:
    from kvbench.core.canaries.answer_kinds import CanaryAnswer
    from kvbench.core.canaries.pool import CanaryPool
    from kvbench.core.records import Outputs


@dataclass(frozen=True)
class EarlierSessions:
    """The trials of each cell and method in order; empty for a new run."""

    trials: Mapping[tuple[Cell, Method], Sequence[TrialRecord]] = field(default_factory=dict)
    results: Mapping[Cell, Sequence[CellResult]] = field(default_factory=dict)
    """Results of the finished cells, the main one first; failed cells may succeed later."""
    outputs: Mapping[tuple[str, int], Outputs] = field(default_factory=dict)
    """Greedy outputs and idle latency by deployment and input length."""
    canaries: Mapping[tuple[str, int, int], CanaryPool] = field(default_factory=dict)
    hosts: Mapping[str, Any] = field(default_factory=dict)
    """Remote hosts' properties by name."""
    forced: bool = False
    """Resume even if the stored trials differ from those this kvbench would request."""
    had_failures: bool = False
    """Whether a cell has failed: cells measured after its retry know more than they did, so their searches
    accept the stored trials."""

    def tried(self, cell: Cell, method: Method) -> list[TrialRecord]:
        return list(self.trials.get((cell, method), ()))

    def finished(self, cell: Cell) -> bool:
        return cell in self.results

    def check(self, record: TrialRecord, trial_id: str, rate: float, purpose: str) -> None:
        """Raise StoreError if the stored trial is not the one that the search requests."""
        same_rate = math.isclose(record.request_rate, rate, rel_tol=1e-9)
        as_requested = self.had_failures or (same_rate and record.purpose == purpose)
        if self.forced or (record.trial_id == trial_id and as_requested):
            return
        raise StoreError(
            f"the folder's trial {record.trial_id} at {record.request_rate:g} req/s ({record.purpose}) is "
            f"not the trial that the search requests there: {trial_id} at {rate:g} req/s ({purpose})",
            hint="another kvbench version wrote it, or it was edited: start a new run, or use --force",
        )


def earlier_sessions(run: RunFolder, search_method: Method, *, forced: bool = False) -> EarlierSessions:
    """Read a folder. ``search_method``: the method that is measured last for a cell."""
    trials: dict[tuple[Cell, Method], list[TrialRecord]] = {}
    for record in run.all_trials:
        trials.setdefault((record.cell, record.method), []).append(record)
    results: dict[Cell, list[CellResult]] = {}
    for result in [*run.cells, *run.other_cells]:
        results.setdefault(result.cell, []).append(result)
    return EarlierSessions(
        trials=trials,
        results={
            cell: group
            for cell, group in results.items()
            if any(ends_cell(result, search_method) for result in group)
        },
        outputs=dict(_outputs(run.outputs)),
        canaries=canary_pools(run.canaries),
        hosts=run.environment.get("hosts") or {},
        forced=forced,
        had_failures=_had_failures(run),
    )


def _had_failures(run: RunFolder) -> bool:
    """Return whether any line of cells.jsonl reports a failure, even a replaced one."""
    with suppress(OSError):
        return re.search(rb'"status": ?"failed"', (run.path / CELLS).read_bytes()) is not None
    return False


def changed_outputs(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, str, str]]:
    """Return (label, input length, then, now) of outputs that differ between sessions: per label and length
    the first difference. ``rows``: lines of outputs.jsonl."""
    first: dict[tuple[str, int], Outputs] = {}
    changed: dict[tuple[str, int], tuple[str, str]] = {}
    for key, outputs in _outputs(rows):
        known = first.setdefault(key, outputs)
        if any(repeat.texts != known.texts for repeat in known.repeats):
            continue  # it does not agree with itself within one session either
        found = [pair for pair in zip(known.texts, outputs.texts, strict=False) if pair[0] != pair[1]]
        if found:
            changed[key] = found[0]
    return [(*key, *pair) for key, pair in changed.items()]


def canary_pools(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int, int], CanaryPool]:
    """Return the right answers in canaries.jsonl, by deployment, input and output length."""
    from kvbench.core.canaries.pool import CanaryPool

    found = {}
    for row in rows:
        with suppress(KeyError, TypeError, ValueError):
            if "texts" in row:
                pool = CanaryPool.from_json(row, _outputs_of(row))
                found[pool.key] = pool
    return found


def extra_canaries(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[CanaryAnswer]]:
    """Return the additional canary answers in canaries.jsonl, by trial; of an interrupted one that was
    repeated, the last."""
    from kvbench.core.canaries.answer_kinds import CanaryAnswer

    found: dict[str, list[CanaryAnswer]] = {}
    for row in rows:
        with suppress(KeyError, TypeError, ValueError):
            if "asked" in row:
                found[str(row["trial_id"])] = [*map(CanaryAnswer.from_json, row["asked"])]
    return found


def pool_row(pool: CanaryPool) -> dict[str, Any]:
    """Return right answers as a line of canaries.jsonl."""
    return {**pool.to_json(), **_row_of(pool.answers)}


def extra_row(trial_id: str, canaries: Sequence[CanaryAnswer]) -> dict[str, Any]:
    """Return additional canary answers as a line of canaries.jsonl."""
    return {"trial_id": trial_id, "asked": [asdict(canary) for canary in canaries]}


def _outputs(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[tuple[str, int], Outputs]]:
    """Yield the outputs of each complete line; incomplete ones are requested again."""
    for row in rows:
        with suppress(KeyError, TypeError, ValueError):
            yield (str(row["label"]), int(row["input_len"])), _outputs_of(row)


def _outputs_of(row: Mapping[str, Any]) -> Outputs:
    from kvbench.core.records import Outputs, TokenChoice

    choices = (
        tuple(TokenChoice(str(token), {str(k): float(v) for k, v in known.items()}) for token, known in seq)
        for seq in row.get("choices", ())
    )
    return Outputs(
        tuple(map(str, row["texts"])),
        float(row["latency_s"]),
        tuple(choices),
        tuple(_outputs_of(repeat) for repeat in row.get("repeats", ())),
    )


def ends_cell(result: CellResult, search_method: Method) -> bool:
    """Return whether the line completes its cell: first tier of its own method."""
    decided = result.status in ("done", "refused", "skipped")
    return decided and (result.main or (result.method == search_method and not result.tier))


def output_row(label: str, input_len: int, outputs: Outputs) -> dict[str, Any]:
    return {"label": label, "input_len": input_len, **_row_of(outputs)}


def _row_of(outputs: Outputs) -> dict[str, Any]:
    row: dict[str, Any] = {"texts": list(outputs.texts), "latency_s": outputs.latency_s}
    if outputs.choices:
        row["choices"] = [[[pick.token, dict(pick.logprobs)] for pick in one] for one in outputs.choices]
    if outputs.repeats:
        row["repeats"] = [_row_of(repeat) for repeat in outputs.repeats]
    return row


ELSEWHERE: Final = "resumed elsewhere"
"""Label of a run that was resumed on another machine or with other software."""

_OF_THE_MACHINE: Final = (
    ("kvbench", ""),
    ("hostname", ""),
    ("kernel", ""),
    ("cpu", "model"),
    ("cpu", "cores"),
    ("cpu", "usable_cores"),
    ("cpu", "cgroup_limit"),
    ("memory", "total_bytes"),
    ("python", "version"),
)
_DEVICES: Final = {"gpus": ("name", "driver_version"), "nics": ("name", "speed_mbit"), "rdma": ("name",)}


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences in kvbench version, machine, devices, libraries and settings."""
    for name, before, after in _facts(then, now):
        if before != after:
            yield f"{name}: {_shown(before)} then, {_shown(after)} now"


def host_differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences between remote hosts, by scenario name. New and unused hosts are differences;
    hosts that the run had not reached yet are not."""
    if not then:
        return []
    found = [f"host {name}: no longer used" for name in then if name not in now]
    found += [f"host {name}: not used before" for name in now if name not in then]
    for name in now:
        if name in then:
            found += [
                f"host {name}, {difference}" for difference in differences(then[name] or {}, now[name] or {})
            ]
    return found


def _facts(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (what, before, now)."""
    for part, key in _OF_THE_MACHINE:
        yield f"{part} {key}".strip(), _fact(then, part, key), _fact(now, part, key)
    for part, shown in _DEVICES.items():
        yield part, _devices(then, part, shown), _devices(now, part, shown)
    for part in ("libraries", "env"):
        before, after = then.get(part) or {}, now.get(part) or {}
        for name in sorted({*before, *after}):
            yield name, before.get(name), after.get(name)


def _fact(machine: Mapping[str, Any], part: str, key: str) -> Any:
    facts = machine.get(part)
    return (facts or {}).get(key) if key else facts


def _devices(machine: Mapping[str, Any], part: str, keys: tuple[str, ...]) -> list[str]:
    """Return physical devices in words; virtual network interfaces are ignored."""
    found = [device for device in machine.get(part) or () if part != "nics" or device.get("pci_address")]
    return sorted(" ".join(str(device.get(key)) for key in keys if device.get(key)) for device in found)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return "none" if value is None else str(value)
