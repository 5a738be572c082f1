"""Kill a real sweep a hundred times at random moments: ``make kills``. Nothing may be lost.

A small sweep of emulated engines is started, killed (SIGKILL) and resumed until its end; then another one.
After each kill: the folder reads without an error, no process, port or shared memory of the run is left
within ten seconds, and what was stored stays as it was, with its checksums. After each resume: at most one
trial was redone, none that was stored. At its end the run verifies. Exit code 1 if any of that failed.
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from kvbench.core.load.arrivals import trial_seed
from kvbench.errors import EXIT_FAILED, EXIT_OK, EXIT_SLO_NOT_MET
from kvbench.launchers.parts.tagged import tagged
from kvbench.report.report import write_report
from kvbench.results.checksums import damages
from kvbench.results.run import RunFolder, load_run
from kvbench.sweep.verify.audit import audit
from tools.bench import HOST, arguments, conclude, table, workplace

SMALL: Final = (
    *("connectors=[aggregated,tcp]", "workload.input_len=[64]", "workload.output_len=4"),
    *("slo.ttft_ms=2000", "slo.tpot_ms=500", "slo.attainment=0.8"),
    *("search.min_rate=15", "search.start_rate=20", "search.max_rate=60", "search.precision=0.3"),
    *("search.trial_s=0.5", "search.max_trial_s=0.5", "search.min_requests=10", "search.max_trials=5"),
    *("search.equal_rate=true", "deployment.base_port=0", "deployment.ready_timeout_s=60"),
)
LIFE_S: Final = (0.3, 9.0)
"""Shortest and longest life before a kill at a random moment."""
CHANGE_S: Final = 3.0
TRIAL_S: Final = 30.0
LONGEST_PAUSE_S: Final = 1.5
GONE_S: Final = 10.0
END_S: Final = 120.0
STORED: Final = ("trials.jsonl", "cells.jsonl", "outputs.jsonl")
CHANGING: Final = (*STORED, "manifest.json", "requests", "telemetry", ".")
SHARED_MEMORY: Final = Path("/dev/shm")


@dataclass
class Tally:
    """What came of the kills. ``problems`` names the run of each failure."""

    moments: Counter[str] = field(default_factory=Counter)
    redone: Counter[int] = field(default_factory=Counter)
    kills: int = 0
    valid: int = 0
    clean: int = 0
    resumes: int = 0
    runs: int = 0
    trials: int = 0
    slowest_gone_s: float = 0.0
    problems: list[str] = field(default_factory=list)


class Life:
    """A sweep that is killed and resumed: its folder, and what was stored and in use before."""

    def __init__(self, results: Path, tally: Tally, chance: random.Random) -> None:
        results.mkdir(parents=True)
        self._results, self._tally, self._chance = results, tally, chance
        self._folder: Path | None = None
        self._before: dict[str, bytes] = {}
        self._memory, self._sessions = _shared_memory(), 0

    def run(self, wanted: int) -> None:
        """Kill it at random moments until ``wanted`` kills are reached, and let it end."""
        tally = self._tally
        with tempfile.TemporaryFile() as output:
            while True:
                last, folder = tally.kills >= wanted, self._folder
                output.seek(0)
                output.truncate()
                words = (
                    ["--resume", str(folder)] if folder else ["quickstart", "--output", str(self._results)]
                )
                sets = [] if folder else [word for value in SMALL for word in ("--set", value)]
                argv = [sys.executable, "-m", "kvbench.cli", "sweep", *words, *sets]
                tally.resumes += folder is not None
                with subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT) as process:
                    try:
                        status = _wait(process, END_S) if last else self._until_killed(process)
                    finally:
                        process.kill()
                if status is None and not last:
                    tally.kills += 1
                    self._look(killed=True)
                    continue
                self._look(killed=False)
                if status not in (EXIT_OK, EXIT_SLO_NOT_MET, EXIT_FAILED) or self._folder is None:
                    output.seek(0)
                    how = f"did not end within {END_S:g} s" if status is None else f"ended with {status}"
                    text = output.read().decode("utf-8", "replace")
                    tally.problems.append(f"{self._folder} {how}:\n{text}")
                    return
                run = load_run(self._folder)
                tally.problems += _wrong_at_the_end(run)
                tally.runs += 1
                tally.trials += len(run.all_trials)
                return

    def _until_killed(self, process: subprocess.Popen[bytes]) -> int | None:
        """Wait for a moment to kill at; return the exit status if the process has ended before.

        A random moment since the start; or the next change of the folder after it; or, so that a slow machine
        gets on as well, a random one after the next trial was stored.
        """
        folder, chance = self._folder, self._chance
        way = chance.choice(("time", "change", "trial", "trial")) if folder is not None else "time"
        if folder is None or way != "trial":
            status = _wait(process, chance.uniform(*LIFE_S))
            if status is not None or folder is None or way == "time":
                return status
        names = STORED[:1] if way == "trial" else CHANGING
        stamp, deadline = _stamp(folder, names), time.monotonic() + (TRIAL_S if way == "trial" else CHANGE_S)
        while _stamp(folder, names) == stamp and time.monotonic() < deadline:
            if (status := _wait(process, 0.001)) is not None:
                return status
        return _wait(process, chance.uniform(0.0, LONGEST_PAUSE_S if way == "trial" else 0.02))

    def _look(self, *, killed: bool) -> None:
        """Note what is wrong with the folder, and with what is left of its processes."""
        tally, moment, wrong, left = self._tally, "before the folder was there", list[str](), list[str]()
        visible = (path for path in self._results.iterdir() if not path.name.startswith("."))
        self._folder = folder = self._folder or next(visible, None)
        if folder is None:
            tally.redone[0] += killed
        else:
            left = self._left_behind(folder) if killed else []
            try:
                run = load_run(folder)
                wrong = list(_invalid(run, self._before))
                write_report(folder, ("md", "csv", "json"))
                if killed:
                    moment = self._moment(run, wrong)
            except Exception as error:  # whatever it is, a reader must not meet it
                wrong = [f"{folder} cannot be read: {type(error).__name__}: {error}"]
            self._before = {name: _content(folder / name) for name in STORED}
        tally.problems += [*left, *wrong]
        if killed:
            tally.clean += not left
            tally.valid += not wrong
            tally.moments[moment] += 1
            print(f"kill {tally.kills}: {moment}", flush=True)

    def _moment(self, run: RunFolder, wrong: list[str]) -> str:
        """Return when it was killed; add to ``wrong`` if more was redone than may be."""
        sessions = len(run.manifest["sessions"])
        # One that was killed before it had opened the folder has begun nothing.
        begun = _begun(run.path, sessions) if sessions > self._sessions else set()
        self._sessions = sessions
        redone = begun - {trial.trial_id for trial in run.all_trials}
        lines = self._before.get("trials.jsonl", b"").split(b"\n")[:-1]
        again = begun & {json.loads(line)["trial_id"] for line in lines}
        self._tally.redone[len(redone)] += 1
        if len(redone) > 1 or again:
            wrong.append(f"{run.path}: trials were redone: {sorted(redone)}, stored ones: {sorted(again)}")
        if run.manifest.get("status") == "complete":
            return "after its end, at the report"
        if redone:
            return "within a trial"
        return "between trials" if begun else "before the first trial of a session"

    def _left_behind(self, folder: Path) -> list[str]:
        """Return processes, ports and shared memory of a killed run that are not gone in time."""
        began = time.monotonic()
        while True:
            processes = [process for process in tagged() if process.tag.startswith(folder.name)]
            left = [f"process {process.pid} ({process.command})" for process in processes]
            left += [*_ports(folder), *_unused(_shared_memory() - self._memory)]
            gone_s = time.monotonic() - began
            if not left:
                self._tally.slowest_gone_s = max(self._tally.slowest_gone_s, gone_s)
                return []
            if gone_s > GONE_S:
                return [f"{folder} left behind: {', '.join(left)}"]
            time.sleep(0.05)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    with suppress(subprocess.TimeoutExpired):
        return process.wait(seconds)
    return None


def _stamp(folder: Path, names: Sequence[str]) -> list[int]:
    return [path.stat().st_mtime_ns if (path := folder / name).exists() else 0 for name in names]


def _ports(folder: Path) -> Iterator[str]:
    plan = json.loads((folder / "plan.json").read_text())
    deployments = (plan.get("processes") or {}).values()
    ports = {int(process.get("port") or 0) for deployment in deployments for process in deployment.values()}
    for port in sorted(ports - {0}):
        with socket.socket() as probe:
            probe.settimeout(0.5)
            if probe.connect_ex((HOST, port)) == 0:
                yield f"port {port}"


def _shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


def _unused(names: set[str]) -> list[str]:
    """Return those of /dev/shm that no living process uses: the others may belong to other programs."""
    used = set[str]()
    for process in psutil.process_iter() if names else ():
        with suppress(psutil.Error, OSError):
            used |= {Path(mapping.path).name for mapping in process.memory_maps()}
            used |= {Path(file.path).name for file in process.open_files()}
    return sorted(names - used)


def _invalid(run: RunFolder, before: dict[str, bytes]) -> Iterator[str]:
    ids = [trial.trial_id for trial in run.all_trials]
    if len(ids) != len(set(ids)):
        yield f"{run.path}: a trial is stored twice: {ids}"
    for trial in run.all_trials:
        if not len(run.requests(trial.trial_id, ["request_id"])):
            yield f"{run.path}: {trial.trial_id} has no requests"
        key = f"in{trial.cell.input_len}-out{trial.cell.output_len}"
        number = int(trial.trial_id.rsplit("-", 1)[1])
        if trial.method == "equal_rate":  # all have the requests of the first one
            key, number = f"equal-{key}", 1
        if trial.seed != trial_seed(int(run.manifest["seed"]), key, number):
            yield f"{run.path}: {trial.trial_id} has another seed than planned"
    for name, content in before.items():
        if not _content(run.path / name).startswith(content[: content.rfind(b"\n") + 1]):
            yield f"{run.path}/{name}: what was stored has changed"
    yield from (f"{run.path}: {warning}" for warning in run.warnings if "cut off" not in warning)
    yield from (f"{run.path} is taken for an edited run: {damage}" for damage in damages(run.path))


def _wrong_at_the_end(run: RunFolder) -> Iterator[str]:
    # A machine that is busy otherwise has trials refused, and that is an answer as well.
    cells = {result.cell.key for result in run.cells if result.status in ("done", "refused")}
    planned = {cell["key"] for cell in run.plan["cells"]}
    if run.manifest.get("status") != "complete" or cells != planned:
        yield f"{run.path} is {run.manifest.get('status')} with {sorted(cells)} of {sorted(planned)}"
    at_one_rate = [trial.request_rate for trial in run.equal_rate_trials]
    known = [rate for result in run.cells if result.answer and (rate := result.answer["max_request_rate"])]
    if len(known) == len(planned) and at_one_rate != [min(known)] * len(planned):
        yield f"{run.path}: {at_one_rate} were offered to all, and the lowest rate is {min(known)}"
    yield from (f"{run.path} does not verify: {damage}" for damage in audit(run.path).damages)


def _begun(folder: Path, sessions: int) -> set[str]:
    """Return trials that the newest session has begun: each has a load generator with a log of its own."""
    ending = f"-session-{sessions}" if sessions > 1 else ""
    found = set()
    for path in (folder / "logs").glob("*/loadgen-*.log"):
        own = path.parent.name.endswith(ending) if ending else "-session-" not in path.parent.name
        if own and "-in" in path.stem:
            found.add(path.stem.removeprefix("loadgen-"))
    return found


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def main() -> int:
    seed = random.SystemRandom().randrange(10**6)
    options = arguments(
        __doc__,
        kills=(100, "to do"),
        seed=(seed, "of the moments"),
        keep=(Path, "folder in which the runs stay"),
    )
    print(f"{options.kills} kills, --seed {options.seed}", flush=True)
    chance, tally, began = random.Random(options.seed), Tally(), time.monotonic()
    with workplace("kills") as (scratch, _), suppress(KeyboardInterrupt):
        while tally.kills < options.kills and not tally.problems:
            Life((options.keep or scratch) / str(tally.runs), tally, chance).run(options.kills)
    moments = [[moment, str(count)] for moment, count in tally.moments.most_common()]
    print(table("moment of the kill", "kills", [*moments, ["all", str(tally.kills)]]))
    facts = {
        "folders that read without an error": f"{tally.valid} of {tally.kills}",
        "nothing left within 10 s": f"{tally.clean} of {tally.kills}, slowest {tally.slowest_gone_s:.1f} s",
        "trials redone after a kill": ", ".join(f"{n}: {c} times" for n, c in sorted(tally.redone.items())),
        "resumes": tally.resumes,
        "sweeps brought to their end, trials": f"{tally.runs}, {tally.trials}",
        "minutes": f"{(time.monotonic() - began) / 60:.1f}",
    }
    return conclude(facts, tally.problems) or int(tally.kills < options.kills)


if __name__ == "__main__":
    sys.exit(main())
