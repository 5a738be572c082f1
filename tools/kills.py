"""Kills a real sweep a hundred times at random moments, and demands after each that nothing is lost.

``python -m tools.kills`` or ``make kills``. A small sweep of emulated engines is started, killed (SIGKILL)
and resumed, again and again, until it has come to its end; then another one. After each kill: the folder
reads without an error, no process, port or shared memory of the run is left within ten seconds, what was
stored stays as it was, byte for byte, and its checksums hold. After each resume: at most one trial was
redone, none of those that were stored. At its end it verifies. Exit code 1 if any of that failed.
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
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from kvbench.core.plan.plan import trial_seed
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
LONGEST_LIFE_S: Final = 9.0
CHANGE_S: Final = 3.0
TRIAL_S: Final = 30.0
LONGEST_PAUSE_S: Final = 1.5
SHORTEST_LIFE_S: Final = 0.3
GONE_S: Final = 10.0
END_S: Final = 120.0
STORED: Final = ("trials.jsonl", "cells.jsonl", "outputs.jsonl")
SHARED_MEMORY: Final = Path("/dev/shm")


@dataclass
class Tally:
    """What came of the kills. ``problems`` says of each failure which run it was."""

    moments: Counter[str] = field(default_factory=Counter)
    redone: Counter[int] = field(default_factory=Counter)
    kills: int = 0
    valid: int = 0
    clean: int = 0
    resumes: int = 0
    runs: int = 0
    trials: int = 0
    slowest_gone_s: float = 0.0
    last: str = ""
    sessions: int = 0
    """Of the run that is being killed, as of its last kill."""
    problems: list[str] = field(default_factory=list)

    def killed(self, moment: str) -> None:
        self.moments[moment] += 1
        self.last = moment


def kill_one_run(results: Path, tally: Tally, wanted: int, chance: random.Random) -> None:
    """Starts a sweep, kills it at random moments until ``wanted`` kills are reached, and lets it end."""
    results.mkdir(parents=True)
    memory, tally.sessions = _shared_memory(), 0
    folder: Path | None = None
    before: dict[str, bytes] = {}
    with tempfile.TemporaryFile() as said:

        def failed(what: str) -> None:
            said.seek(0)
            tally.problems.append(f"{folder} {what}:\n{said.read().decode('utf-8', 'replace')}")

        while True:
            last = tally.kills >= wanted
            said.seek(0)
            said.truncate()
            words = ["--resume", str(folder)] if folder else ["quickstart", "--output", str(results)]
            sets = [] if folder else [word for value in SMALL for word in ("--set", value)]
            argv = [sys.executable, "-m", "kvbench.cli", "sweep", *words, *sets]
            tally.resumes += folder is not None
            with subprocess.Popen(argv, stdout=said, stderr=subprocess.STDOUT) as life:
                try:
                    status = _wait(life, END_S) if last else _until_killed(life, folder, chance)
                finally:
                    life.kill()
            if status is None and last:
                failed(f"did not end within {END_S:g} s")
                return
            tally.kills += status is None
            folder = folder or _folder_in(results)
            tally.problems += _look(folder, before, tally, memory, killed=status is None)
            if folder is not None:
                before = {name: _content(folder / name) for name in STORED}
            if status is None:
                print(f"kill {tally.kills}: {tally.last}", flush=True)
            elif status not in (EXIT_OK, EXIT_SLO_NOT_MET, EXIT_FAILED) or folder is None:
                failed(f"ended with {status}")
                return
            else:
                tally.problems += list(_wrong_at_the_end(load_run(folder)))
                tally.runs += 1
                tally.trials += len(load_run(folder).all_trials)
                return


def _wait(life: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The exit status; None if it still runs after so long."""
    with suppress(subprocess.TimeoutExpired):
        return life.wait(seconds)
    return None


def _until_killed(life: subprocess.Popen[bytes], folder: Path | None, chance: random.Random) -> int | None:
    """Waits for a moment to kill at; returns the exit status if the process has ended before.

    A random one since the start; or the next change of the folder after such a one; or, so that a slow
    machine gets on as well, a random one after the next trial was stored.
    """
    way = chance.choice(("time", "change", "trial", "trial")) if folder is not None else "time"
    if folder is None or way != "trial":
        status = _wait(life, chance.uniform(SHORTEST_LIFE_S, LONGEST_LIFE_S))
        if status is not None or folder is None or way == "time":
            return status
    stamp_of = _trials if way == "trial" else _stamp
    stamp, deadline = stamp_of(folder), time.monotonic() + (TRIAL_S if way == "trial" else CHANGE_S)
    while stamp_of(folder) == stamp and time.monotonic() < deadline:
        if (status := _wait(life, 0.001)) is not None:
            return status
    return _wait(life, chance.uniform(0.0, LONGEST_PAUSE_S if way == "trial" else 0.02))


def _stamp(folder: Path) -> list[int]:
    names = (*STORED, "manifest.json", "requests", "telemetry", ".")
    return [_changed(folder / name) for name in names]


def _trials(folder: Path) -> list[int]:
    return [len(_content(folder / "trials.jsonl"))]


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _look(
    folder: Path | None, before: dict[str, bytes], tally: Tally, memory: set[str], *, killed: bool
) -> list[str]:
    """What is wrong with a folder, and with what is left of its processes, after a life."""
    if folder is None:
        tally.killed("before the folder was there")
        tally.valid += 1
        tally.clean += 1
        tally.redone[0] += 1
        return []
    problems = [] if not killed else _left_behind(folder, memory, tally)
    tally.clean += killed and not problems
    try:
        run = load_run(folder)
        wrong = list(_invalid(run, before))
        write_report(folder, ("md", "csv", "json"))
    except Exception as error:  # whatever it is, a reader must not meet it
        return [*problems, f"{folder} cannot be read: {type(error).__name__}: {error}"]
    tally.valid += killed and not wrong
    if killed:
        sessions = len(run.manifest["sessions"])
        # One that was killed before it had opened the folder has begun nothing.
        begun = _begun(folder, sessions) if sessions > tally.sessions else set()
        tally.sessions = sessions
        stored = {trial.trial_id for trial in run.all_trials}
        redone = begun - stored
        again = begun & _ids(before)
        tally.redone[len(redone)] += 1
        tally.killed(_moment(run, begun, redone))
        if len(redone) > 1 or again:
            wrong.append(f"{folder}: trials were redone: {sorted(redone)}, stored ones: {sorted(again)}")
    return [*problems, *wrong]


def _moment(run: RunFolder, begun: set[str], redone: set[str]) -> str:
    if run.manifest.get("status") == "complete":
        return "after its end, at the report"
    if redone:
        return "within a trial"
    return "between trials" if begun else "before the first trial of a session"


def _left_behind(folder: Path, memory: set[str], tally: Tally) -> list[str]:
    """Processes, ports and shared memory of a killed run that are not gone in time."""
    began = time.monotonic()
    while True:
        processes = [each for each in tagged() if each.tag.startswith(folder.name)]
        left = [f"process {each.pid} ({each.command})" for each in processes]
        left += [*_ports(folder), *_nobodys(_shared_memory() - memory)]
        gone_s = time.monotonic() - began
        if not left:
            tally.slowest_gone_s = max(tally.slowest_gone_s, gone_s)
            return []
        if gone_s > GONE_S:
            return [f"{folder} left behind: {', '.join(left)}"]
        time.sleep(0.05)


def _ports(folder: Path) -> list[str]:
    plan = json.loads((folder / "plan.json").read_text())
    ports = {
        int(process.get("port") or 0)
        for deployment in (plan.get("processes") or {}).values()
        for process in deployment.values()
    }
    return [f"port {port}" for port in sorted(ports - {0}) if _listens(port)]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((HOST, port)) == 0


def _shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


def _nobodys(names: set[str]) -> list[str]:
    """Those of /dev/shm that no living process uses: what others made meanwhile is theirs."""
    if not names:
        return []
    used = set()
    for process in psutil.process_iter():
        try:
            used |= {Path(each.path).name for each in process.memory_maps()}
            used |= {Path(each.path).name for each in process.open_files()}
        except (psutil.Error, OSError):
            continue
    return sorted(names - used)


def _invalid(run: RunFolder, before: dict[str, bytes]) -> Iterator[str]:
    """What a reader of the folder must not find."""
    ids = [trial.trial_id for trial in run.all_trials]
    if len(ids) != len(set(ids)):
        yield f"{run.path}: a trial stands there twice: {ids}"
    for trial in run.all_trials:
        if not len(run.requests(trial.trial_id, ["request_id"])):
            yield f"{run.path}: {trial.trial_id} has no requests"
        if trial.seed != _seed(run, trial.to_json()):
            yield f"{run.path}: {trial.trial_id} has another seed than planned"
    for name, content in before.items():
        whole = content[: content.rfind(b"\n") + 1]
        if not _content(run.path / name).startswith(whole):
            yield f"{run.path}/{name}: what was stored has changed"
    for warning in run.warnings:
        if "cut off" not in warning:
            yield f"{run.path}: {warning}"
    for damage in damages(run.path):
        yield f"{run.path} is taken for an edited run: {damage}"


def _seed(run: RunFolder, trial: dict[str, Any]) -> int:
    cell, number = trial["cell"], int(trial["trial_id"].rsplit("-", 1)[1])
    key = f"in{cell['input_len']}-out{cell['output_len']}"
    if trial["method"] == "equal_rate":
        key = f"equal-{key}"
    return trial_seed(int(run.manifest["seed"]), key, number)


def _wrong_at_the_end(run: RunFolder) -> Iterator[str]:
    """What is not as after a run without a break."""
    # A machine that is busy otherwise has trials refused, and that is an answer as well.
    cells = {result.cell.key for result in run.cells if result.status in ("done", "refused")}
    planned = {cell["key"] for cell in run.plan["cells"]}
    if run.manifest.get("status") != "complete" or cells != planned:
        yield f"{run.path} is {run.manifest.get('status')} with {sorted(cells)} of {sorted(planned)}"
    at_one_rate = [trial.request_rate for trial in run.other_trials if trial.method == "equal_rate"]
    rates = [result.answer["max_request_rate"] for result in run.cells if result.answer]
    known = [rate for rate in rates if rate]
    if len(known) == len(planned) and at_one_rate != [min(known)] * len(planned):
        yield f"{run.path}: {at_one_rate} were offered to all, and the lowest rate is {min(known)}"
    for damage in audit(run.path).damages:
        yield f"{run.path} does not verify: {damage}"


def _begun(folder: Path, sessions: int) -> set[str]:
    """Trials that the newest session has begun: each has a load generator with a log of its own."""
    ending = f"-session-{sessions}" if sessions > 1 else ""
    found = set()
    for path in (folder / "logs").glob("*/loadgen-*.log"):
        own = path.parent.name.endswith(ending) if ending else "-session-" not in path.parent.name
        if own and "-in" in path.stem:
            found.add(path.stem.removeprefix("loadgen-"))
    return found


def _ids(stored: dict[str, bytes]) -> set[str]:
    lines = stored.get("trials.jsonl", b"").split(b"\n")[:-1]
    return {json.loads(line)["trial_id"] for line in lines}


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _folder_in(results: Path) -> Path | None:
    return next((path for path in results.iterdir() if not path.name.startswith(".")), None)


def main() -> int:
    seed = random.SystemRandom().randrange(10**6)
    asked = arguments(
        __doc__,
        kills=(100, "to do"),
        seed=(seed, "of the moments"),
        keep=(Path, "folder in which the runs stay"),
    )
    print(f"{asked.kills} kills, --seed {asked.seed}", flush=True)
    chance, tally, began = random.Random(asked.seed), Tally(), time.monotonic()
    with workplace("kills") as (scratch, _), suppress(KeyboardInterrupt):
        while tally.kills < asked.kills and not tally.problems:
            kill_one_run((asked.keep or scratch) / str(tally.runs), tally, asked.kills, chance)
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
    return conclude(facts, tally.problems) or int(tally.kills < asked.kills)


if __name__ == "__main__":
    sys.exit(main())
