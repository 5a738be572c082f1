"""``kvbench simulate --system``: the whole search against somebody else's simulator, a real child process."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvbench.errors import StoreError
from kvbench.planning.overrides import CliOptions
from kvbench.results.run import RunFolder, load_run
from kvbench.sweep.resume import reopen
from kvbench.sweep.simulate import simulated
from tests.support.commands import Running, kvbench, tagged_processes, the_run, wait_until
from tests.support.simulators import ECHO, QUEUE, command, md1_rate

pytestmark = [pytest.mark.timeout(240), pytest.mark.real]
ROOT = Path(__file__).parents[3]
LOAD = ("--input-len", "512", "--output-len", "1", "--ttft-ms", "300", "--attainment", "0.9")


def options(system: str, *sets: str, service_s: float = 0.1) -> CliOptions:
    """A search for M/D/1's rate: 90 % of first tokens within three service times."""
    return CliOptions(
        system=system, overrides=sets, input_len="512", output_len=1, ttft_ms=3e3 * service_s, attainment=0.9
    )


def searched(tmp_path: Path, cli: CliOptions) -> RunFolder:
    return load_run(simulated(cli, tmp_path / "results"))


# -- the rate that it finds ---------------------------------------------------------------------------
@pytest.mark.parametrize("aborts", ["", "abort"])
@pytest.mark.parametrize(
    "service_s", [0.02, *(pytest.param(seconds, marks=pytest.mark.heavy) for seconds in (0.005, 0.1))]
)
def test_the_rate_of_a_queue_is_found(tmp_path: Path, service_s: float, aborts: str) -> None:
    """Over three seeds: the median within 10 % of the formula's, and none far off."""
    truth = md1_rate(service_s, 3 * service_s, 0.9)
    assert truth * service_s == pytest.approx(0.587, abs=1e-3)
    system = command(tmp_path, QUEUE, service_s, *([aborts] if aborts else []))
    found = []
    for seed in (1, 2, 3):
        run = searched(tmp_path, options(system, f"seed={seed}", service_s=service_s))
        (cell,) = run.cells
        assert cell.status == "done"
        answer = cell.answer or {}
        found.append(answer["max_request_rate"])
        assert answer["lower"] <= found[-1] <= answer["upper"]
        assert run.labels == ["simulated"]
        assert not [
            finding for trial in run.trials for finding in trial.findings if finding.gate == "backlog"
        ]
    assert found == pytest.approx([truth] * 3, rel=0.2)
    assert sorted(found)[1] == pytest.approx(truth, rel=0.1)


def test_at_the_true_rate_a_trial_has_the_true_share(tmp_path: Path) -> None:
    """What lies between the system's answer and the figures adds nothing: 6,000 requests each."""
    rate = md1_rate(0.1, 0.3, 0.9)
    long = ("search.trial_s=1000", "search.max_requests=20000")
    met = []
    for seed in (1, 2, 3, 4):
        cli = options(command(tmp_path, QUEUE, 0.1), f"seed={seed}", *long)
        run = searched(tmp_path, replace(cli, rates=f"{rate:.6f}", method="fixed"))
        (trial,) = run.all_trials
        met.append(trial.summary["slo_attainment"])
    assert sum(met) / 4 == pytest.approx(0.9, abs=0.015)


def test_a_backlog_is_carried_on_or_dropped(tmp_path: Path) -> None:
    """Three times what is served; the client gives up after 10 s, and so does one of the two servers."""
    begins = {}
    for aborts in ("", "abort"):
        system = command(tmp_path, QUEUE, 1.0, *([aborts] if aborts else []))
        sets = ("workload.request_timeout_s=10", "search.trial_s=30", "search.min_requests=20")
        cli = replace(options(system, *sets), rates="3,0.3", method="fixed")
        first, second = searched(tmp_path, cli).all_trials
        assert first.summary["planned"] == 90
        assert first.verdict != "invalid" != second.verdict
        begins[aborts] = second.engine["starts_at_s"] - first.engine["starts_at_s"]
    assert begins[""] > 90
    assert begins["abort"] < 60


def test_the_same_run_twice_has_the_same_trials(tmp_path: Path) -> None:
    cli = options(command(tmp_path, QUEUE, 0.1))

    def trials(place: str) -> list[dict[str, Any]]:
        path = simulated(cli, tmp_path / place)
        rows = [json.loads(line) for line in (path / "trials.jsonl").read_text().splitlines()]
        return [{key: value for key, value in row.items() if key != "started_at"} for row in rows]

    assert trials("one") == trials("two")


# -- what is told, and when ---------------------------------------------------------------------------
def test_a_run_as_the_system_hears_it(tmp_path: Path) -> None:
    log = tmp_path / "told.jsonl"
    system = command(tmp_path, ECHO, 0.05, log)
    run = searched(tmp_path, options(system, "search.max_rate=40", "search.start_rate=20"))
    messages = [json.loads(line) for line in log.read_text().splitlines()]
    assert [message["type"] for message in messages] == ["trial", "end"] * (len(messages) // 2)
    clock_s = 0.0
    for trial, end in zip(messages[::2], messages[1::2], strict=True):
        assert trial["starts_at_s"] == pytest.approx(clock_s)
        assert len(trial["arrivals_s"]) == len(trial["input_len"]) == len(trial["output_len"])
        assert trial["arrivals_s"] == sorted(trial["arrivals_s"])
        assert 0 <= trial["seed"] < 2**63
        assert end["cancelled"] == []
        assert end["cut_at_s"] <= end["ended_at_s"]
        clock_s += end["ended_at_s"]
    singles = [trial for trial in messages[::2] if len(trial["arrivals_s"]) == 1]
    assert [trial["input_len"] for trial in singles[:4]] == [[512], [505], [512], [505]], "latency of one"
    # Three show how fast the idle system is, two before each further trial that it is idle again.
    assert len(singles) == 4 + 3 + 2 * (len(run.all_trials) - 1)
    assert all(trial.engine["starts_at_s"] > 0 for trial in run.all_trials)
    assert len({trial["seed"] for trial in messages[::2]}) == len(messages) // 2


def test_a_stopped_trial_ends_after_the_grace(tmp_path: Path) -> None:
    """Of a system that never answers more than its first requests."""
    code = ECHO.replace("each + latency_s for", "each + (latency_s if each < 1 else 50) for")
    log = tmp_path / "told.jsonl"
    cli = options(command(tmp_path, code, 0.05, log), "search.max_trials=1", "search.start_rate=20")
    run = searched(tmp_path, cli)
    messages = [json.loads(line) for line in log.read_text().splitlines()]
    sizes = [len(trial["arrivals_s"]) for trial in messages[::2]]
    load, end = messages[2 * sizes.index(max(sizes))], messages[2 * sizes.index(max(sizes)) + 1]
    sent = [arrival for arrival in load["arrivals_s"] if arrival <= end["cut_at_s"]]
    assert end["ended_at_s"] == pytest.approx(end["cut_at_s"] + 20.0)
    assert end["cancelled"] == [place for place, arrival in enumerate(sent) if arrival >= 1]
    records = run.request_records(run.all_trials[0].trial_id)
    assert len(records) == len(sent)
    assert {record.error for record in records if record.scheduled_s >= 1} == {"cancelled"}


BLOCKED = """
import json
import sys

free_s = float("-inf")
for line in sys.stdin:
    told = json.loads(line)
    if told["type"] == "trial":
        at_s, many = told["starts_at_s"], len(told["arrivals_s"]) > 1
        times = [max(each, free_s - at_s) + 0.05 for each in told["arrivals_s"]]
        print(json.dumps({"first_token_s": times, "last_token_s": times}), flush=True)
        if many:
            free_s = at_s + times[-1] + float(sys.argv[1])
"""


@pytest.mark.parametrize(("blocked_s", "void"), [(20.0, False), (5000.0, True)])
def test_no_trial_begins_on_a_backlog(tmp_path: Path, blocked_s: float, void: bool) -> None:
    """After each trial the system does nothing for some time: it is waited for, or the next trial is void."""
    cli = replace(options(command(tmp_path, BLOCKED, blocked_s)), rates="4,5", method="fixed")
    run = searched(tmp_path, cli)
    first, second = run.all_trials
    assert first.verdict != "invalid"
    assert ([finding.gate for finding in second.findings] == ["backlog"]) is void
    assert (second.verdict == "invalid") is void
    assert second.engine["starts_at_s"] > first.engine["starts_at_s"] + first.duration_s + 15


def test_a_slow_system_is_given_the_time_that_its_slo_allows(tmp_path: Path) -> None:
    """A request alone takes 100 s, and may take 150: neither it nor a trial's is cut off after a minute."""
    cli = replace(
        options(command(tmp_path, ECHO, 100.0, tmp_path / "told.jsonl")),
        rates="0.05",
        method="fixed",
        ttft_ms=150e3,
    )
    (trial,) = searched(tmp_path, cli).all_trials
    assert trial.summary["slo_attainment"] == 1.0
    assert (
        trial.engine["starts_at_s"] >= 700
    )  # four requests for their outputs, three to know how fast one is


# -- the command line ---------------------------------------------------------------------------------
def test_the_example_of_the_page_runs_and_tells_the_truth(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "simulate.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (line,) = re.findall(r"^kvbench (simulate --system .*)$", page, re.MULTILINE)
    assert code.count("\n") <= 25
    path = tmp_path / "my_sim.py"
    path.write_text(code)
    words = [
        word.replace("python3 my_sim.py", shlex.join([sys.executable, str(path)]))
        for word in shlex.split(line)
    ]
    kvbench(*words, "--output", str(tmp_path / "results")).succeeded()
    run = the_run(tmp_path / "results")
    assert "external simulator" in (run.path / "report.md").read_text()
    found = float((run.cells[0].answer or {})["max_request_rate"])
    truth = md1_rate(0.1, 0.3, 0.9)
    assert f"**{truth:.2f} req/s**" in page
    assert found == pytest.approx(truth, rel=0.1)
    table = (run.path / "tables" / "summary.csv").read_text().splitlines()[0].split(",")
    assert {"max_request_rate", "lower", "upper", "search"} <= set(table)
    report = (run.path / "report.md").read_text()
    assert "external simulator" in report
    assert "imulated" in report


def test_the_scenario_in_the_folder_is_simulated_again_and_nothing_else(tmp_path: Path) -> None:
    cli = replace(options(command(tmp_path, QUEUE, 0.1)), rates="2", method="fixed")
    first = simulated(cli, tmp_path / "first")
    scenario = str(first / "scenario.yaml")
    again = searched(tmp_path, CliOptions(scenario, rates="2"))
    assert [trial.request_rate for trial in again.all_trials] == [2.0]
    assert again.all_trials[0].summary == load_run(first).all_trials[0].summary
    for words in (["sweep", scenario], ["bench", scenario, "--rate", "2"]):
        done = kvbench(*words).failed(2)
        assert "kvbench simulate" in done.err
    assert "simulator.py" in kvbench("plan", scenario).succeeded().out
    with pytest.raises(StoreError, match="an external simulator"):
        reopen(first)


# -- what goes wrong ----------------------------------------------------------------------------------
ANSWER = 'print(json.dumps({"first_token_s": AT, "last_token_s": AT}), flush=True)'
WRONG = {
    "no json": ('print("ready", flush=True)', "invalid JSON"),
    "a list": ("print([], flush=True)", "not a JSON object"),
    "lengths": (ANSWER.replace("AT", "AT + AT"), "2 entries in first_token_s for 1 requests"),
    "missing": ('print("{}", flush=True)', "no list first_token_s"),
    "order": (ANSWER.replace('"last_token_s": AT', '"last_token_s": [0]'), "before its first token"),
    "negative": (ANSWER.replace("AT", "[-1]"), "is negative"),
    "nan": (ANSWER.replace("AT", '[float("nan")]'), "NaN"),
    "infinite": ('print(\'{"first_token_s": [1e999], "last_token_s": [null]}\', flush=True)', "not finite"),
    "words": (ANSWER.replace("AT", '["now"]'), "not a time"),
    "a misspelling": (ANSWER.replace("last_token_s", "last_tokens"), "unknown keys"),
    "an error of its own": (ANSWER.replace("}", ', "error": ["oops"]}'), "http_error"),
    "two lines": (ANSWER + "; " + ANSWER, "without a request|more than the one line|1 entries"),
    "dies": ('sys.exit("out of memory")', "ended early .status 1.: out of memory"),
    "no such script": (None, "ended early"),
    "hangs": ("import time; time.sleep(600)", "has not answered within 1 s"),
    "never ends": ("(iter(lambda: print('x', end='', flush=True), 1)); import time; time.sleep(600)", "1 s"),
    "closes": ("os.close(1); import time; time.sleep(600)", "closed its pipes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_nonsense_is_told_and_the_folder_can_be_read(tmp_path: Path, name: str) -> None:
    does, reason = WRONG[name]
    code = (
        "import json, os, sys\nprint('about to begin', file=sys.stderr, flush=True)\nfor line in sys.stdin:\n"
        "    told = json.loads(line)\n    if told['type'] == 'end': continue\n"
        f"    AT = [each + 0.1 for each in told['arrivals_s']]\n    {does}\n"
    )
    system = command(tmp_path, code)
    if does is None:
        system = shlex.join([sys.executable, str(tmp_path / "no-such-script.py")])
    run = searched(tmp_path, options(system, "deployment.engine_options.answer_timeout_s=1"))
    (cell,) = run.cells
    assert cell.status == "failed"
    assert re.search(reason, cell.reason), cell.reason
    assert "system.log" in cell.hint or "answer_timeout_s" in cell.hint
    log = (run.path / "logs" / "aggregated" / "system.log").read_text()
    assert ("about to begin" in log) is (does is not None)
    assert tagged_processes(run) == []


def test_a_request_that_never_ends_has_timed_out(tmp_path: Path) -> None:
    """Of many; and half an answer, an error and an answer after the timeout."""
    code = """
import json
import sys

for line in sys.stdin:
    told = json.loads(line)
    if told["type"] == "end":
        continue
    came = told["arrivals_s"]
    first = [each + 0.1 for each in came]
    last, error = [each + 0.2 for each in first], [None] * len(came)
    if len(came) > 1:
        first[0] = last[0] = last[1] = None
        first[2], last[2], error[2] = None, None, "http_error"
        last[3] = first[3] + 100
    events = [[a, a, b] if a and b else None for a, b in zip(first, last)]
    answer = {"first_token_s": first, "last_token_s": last, "error": error, "events_s": events}
    print(json.dumps(answer), flush=True)
"""
    cli = replace(options(command(tmp_path, code)), rates="2", method="fixed", output_len=3)
    cli = replace(cli, overrides=("workload.request_timeout_s=5", "search.trial_s=10"))
    run = searched(tmp_path, cli)
    records = run.request_records(run.all_trials[0].trial_id)
    assert [record.error for record in records[:5]] == ["no_answer", "timeout", "http_error", "timeout", ""]
    assert [len(record.itl_s) for record in records[:5]] == [0, 0, 0, 1, 2]
    assert records[4].itl_s == pytest.approx([0.0, 0.2])
    assert (records[4].output_len, records[4].status, records[2].status) == (3, 200, 0)
    assert {record.error for record in records[4:]} == {""}


def test_ctrl_c_leaves_nothing_running_and_a_folder_that_can_be_read(tmp_path: Path) -> None:
    """A simulator with a child of its own, in the middle of its answer."""
    code = (
        "import subprocess, sys, time\nsubprocess.Popen(['sleep', '600'])\nfor line in sys.stdin:\n"
        "    print('asked', file=sys.stderr, flush=True)\n    time.sleep(600)\n"
    )
    system = command(tmp_path, code)
    with Running("simulate", "--system", system, *LOAD, "--output", str(tmp_path / "results")) as running:
        running.wait_for("run folder")
        run = the_run(tmp_path / "results")
        log = run.path / "logs" / "aggregated" / "system.log"
        wait_until(lambda: log.exists() and "asked" in log.read_text())
        assert len(tagged_processes(run)) >= 2
        running.signal(signal.SIGINT)
        done = running.finish()
    assert done.status == 130
    assert "--resume" not in done.text
    time.sleep(0.1)
    assert (tagged_processes(run), load_run(run.path).manifest["status"]) == ([], "interrupted")
    assert not psutil.pid_exists(running.pid)
