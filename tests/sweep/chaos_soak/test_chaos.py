"""``kvbench chaos`` on real processes of emulated pairs: what each fault costs, and that all else holds."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Finished, Running, argv, invoke, kvbench, tagged_processes, the_run, wait_until
from run_files import copied, edit_json, edit_rows, rows_in

from kvbench.results.run import RunFolder, load_run

pytestmark = pytest.mark.timeout(300)
DEADLINE_S = 240.0
"""Of a run of several faults on a machine with other work: each has a deployment of its own."""
EASY = (
    "connectors=[aggregated,tcp]", "workload.input_len=[64]", "workload.output_len=4", "slo.ttft_ms=1500",
    "slo.tpot_ms=1000", "slo.attainment=0.8", "deployment.base_port=0", "deployment.ready_timeout_s=60",
)  # fmt: skip
SHORT = ("--rate", "15", "--before", "2", "--down", "1.5", "--after", "4", "--deadline", "8")


def chaos(results: Path, *faults: str, more: tuple[str, ...] = (), sets: tuple[str, ...] = ()) -> Finished:
    flags = [word for fault in faults for word in ("--fault", fault)]
    words = ("chaos", "quickstart", *SHORT, *flags, "--output", str(results), *more)
    return patient(*words, sets=(*EASY, *sets))


def patient(*words: str, sets: tuple[str, ...] = ()) -> Finished:
    """A command to its end, which may take longer than others."""
    done = subprocess.run(
        argv(*words, sets=sets), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def found(run: RunFolder) -> dict[str, dict[str, Any]]:
    return {trial.summary["chaos"]["name"]: trial.summary["chaos"] for trial in run.all_trials}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Finished, RunFolder]]:
    results = tmp_path_factory.mktemp("chaos")
    first = chaos(results, "restart:prefill", "kill:decode", "freeze:decode")
    return first, the_run(results)


def test_what_each_fault_cost(done: tuple[Finished, RunFolder]) -> None:
    finished, run = done
    assert finished.status == 0, finished.text
    assert run.manifest["status"] == "complete"
    faults = found(run)
    assert set(faults) == {"restart prefill", "kill decode", "freeze decode"}
    restarted, killed, frozen = (faults[name] for name in ("restart prefill", "kill decode", "freeze decode"))
    assert restarted["cost"]["back_s"] >= 1.0
    assert restarted["again"]["taken_up"]
    assert restarted["again"]["ready_s"] > restarted["undone_s"] > restarted["struck_s"]
    assert restarted["cost"]["fates"]["lost"] >= 10
    assert killed["cost"]["back_s"] is None
    assert killed["cost"]["goodput_lost"] >= 15 * 3
    # Whoever is stopped for a second and a half answers late, and nothing is lost.
    assert frozen["cost"]["fates"]["lost"] == frozen["cost"]["fates"]["hung"] == 0
    assert frozen["cost"]["back_s"] is not None
    assert restarted["answers"]["checked"] > 5
    assert all(fault["answers"]["wrong"] == 0 for fault in faults.values())


def test_who_noticed(done: tuple[Finished, RunFolder]) -> None:
    faults = found(done[1])
    noticed = {name: {notice["who"]: notice for notice in fault["noticed"]} for name, fault in faults.items()}
    assert "prefill-0 was killed by signal 9" in noticed["restart prefill"]["kvbench"]["words"]
    assert noticed["restart prefill"]["kvbench"]["after_s"] < 5
    assert "client" in noticed["kill decode"]
    assert "decode-0 was killed" in noticed["kill decode"]["kvbench"]["words"]
    assert all(notice["after_s"] >= 0 for notices in noticed.values() for notice in notices.values())


def test_kv_of_requests_that_d_died_with_is_stranded_on_p(done: tuple[Finished, RunFolder]) -> None:
    """P keeps what the dead D had not fetched, until its lease ends; what is alive holds nothing else."""
    killed = found(done[1])["kill decode"]
    assert set(killed["stranded_blocks"]) <= {"prefill-0"}
    assert (killed["stranded_bytes"] or 0) == pytest.approx(
        sum(killed["stranded_blocks"].values()) * 16 * 2048
    )
    assert found(done[1])["freeze decode"]["stranded_blocks"] == {}
    assert "decode-0" not in killed["after"]
    assert killed["after"]["prefill-0"]["rss_bytes"] > 1e7


def test_its_report_has_the_table_the_picture_and_the_answers(done: tuple[Finished, RunFolder]) -> None:
    finished, run = done
    assert "0 of" in finished.out
    assert "answers wrong: at most" in finished.out
    for text in (finished.out, (run.path / "report.md").read_text(), (run.path / "report.html").read_text()):
        assert "restart prefill" in text
        assert "never" in text
    assert (run.path / "figures" / "faults.svg").stat().st_size > 5000
    table = json.loads((run.path / "tables" / "chaos.json").read_text())
    assert {row["fault"] for row in table["faults"]} == {"restart prefill", "kill decode", "freeze decode"}
    again = invoke("report", str(run.path), "--json")
    assert json.loads(again.out)["runs"][0]["faults"] == table["faults"]


def test_it_verifies_and_an_edit_does_not(done: tuple[Finished, RunFolder], tmp_path: Path) -> None:
    _, run = done
    assert "3 faults" in invoke("verify", str(run.path)).succeeded().out
    other = copied(run.path, tmp_path)
    (other / "checksums.jsonl").unlink(missing_ok=True)
    edit_json(other / "manifest.json", lambda manifest: manifest.pop("checksums"))
    cost = rows_in(other / "trials.jsonl")[0]["summary"]["chaos"]["cost"]
    more = {**cost, "goodput_lost": cost["goodput_lost"] + 1}
    edit_rows(other / "trials.jsonl", lambda row: row["summary"]["chaos"].update(cost=more), 0, 1)
    assert "cost.goodput_lost does not follow from" in invoke("verify", str(other)).failed(1).text


def test_two_runs_are_compared_and_other_kinds_are_refused(done: tuple[Finished, RunFolder]) -> None:
    path = str(done[1].path)
    both = invoke("compare", path, path, "--json").succeeded()
    rows = {row["fault"]: row for row in json.loads(both.out)["rows"]}
    assert rows["kill decode"]["back_before"] == rows["kill decode"]["back_after"] == "never"
    assert all(row["word"] == "no significant difference" for row in rows.values())
    assert "compared as a whole" in invoke("compare", path, path, "--by", "rate").failed(2).text
    assert f"kvbench chaos --resume {path}" in kvbench("sweep", "--resume", path).failed(2).text
    assert "is complete" in kvbench("chaos", "--resume", path).text


@pytest.mark.heavy
def test_an_interrupt_leaves_a_readable_folder_and_nothing_running_and_it_goes_on(tmp_path: Path) -> None:
    flags = ("--fault", "freeze:router", "--fault", "restart:decode", "--fault", "kill:router")
    words = ("chaos", "quickstart", *SHORT, *flags, "--output", str(tmp_path))
    with Running(*words, sets=EASY) as running:
        running.wait_for("goodput lost")  # the first is done; the second is interrupted in its load
        running.wait_for(": ready after")
        time.sleep(3.0)
        running.signal(signal.SIGINT)
        ended = running.finish()
    assert ended.status == 130, ended.text
    run = the_run(tmp_path)
    assert (run.manifest["status"], len(run.all_trials)) == ("interrupted", 1)
    assert "to resume it: kvbench chaos --resume" in ended.text
    wait_until(lambda: not tagged_processes(run))
    assert (run.path / "report.md").exists()
    before = (run.path / "trials.jsonl").read_bytes()
    plan = run.manifest["asked"]["faults"]
    patient("chaos", "--resume", str(run.path)).succeeded()
    whole = load_run(run.path)
    assert (whole.manifest["status"], whole.manifest["asked"]["faults"]) == ("complete", plan)
    assert (run.path / "trials.jsonl").read_bytes().startswith(before)
    assert [trial.summary["chaos"]["fault"]["number"] for trial in whole.all_trials] == [1, 2, 3]
    assert invoke("verify", str(run.path)).status == 0


def test_the_same_seed_gives_the_same_plan(tmp_path: Path) -> None:
    def plan(seed: int) -> dict[str, Any]:
        words = (
            "chaos", "quickstart", *SHORT, "--plan", "--json", "--repeats", "3", "--output", str(tmp_path),
        )  # fmt: skip
        printed: dict[str, Any] = json.loads(kvbench(*words, sets=(*EASY, f"seed={seed}")).out)
        return printed

    assert plan(1) == plan(1)
    assert plan(1) != plan(2)
    assert not list(tmp_path.iterdir())  # nothing was started


def test_wrong_answers_are_seen(tmp_path: Path) -> None:
    """A pair whose KV arrives corrupt answers in time, and wrong."""
    finished = chaos(tmp_path, "freeze:router", sets=("deployment.engine_options.lie=corrupt_kv",))
    (fault,) = found(the_run(tmp_path)).values()
    assert fault["answers"]["wrong"] == fault["answers"]["checked"] > 5
    assert len(fault["wrong_ids"]) == fault["answers"]["wrong"]
    assert fault["answers"]["examples"][0]
    # Wrong answers are no goodput, however fast: what the fault cost counts those after it.
    assert 0 < fault["cost"]["fates"]["wrong"] <= fault["answers"]["wrong"]
    assert f"{fault['answers']['wrong']} of {fault['answers']['checked']} answers wrong" in finished.out


@pytest.mark.parametrize(("words", "message"), [
    (("--fault", "partition:prefill"), "kvbench may drop packets only in a lab's network"),
    (("--fault", "kill:metadata"), "this deployment has no metadata"),
    (("--fault", "melt:decode"), "unknown fault 'melt'"),
    (("--lab", "many"), "is invalid"),
    (("--share", "0.5"), "--share scales a measured rate"),
])  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    refused = invoke("chaos", "quickstart", *SHORT, *words, "--output", str(tmp_path), sets=EASY).failed(2)
    assert message in refused.text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["chaos", "soak"])
def test_a_rate_is_asked_for(command: str) -> None:
    assert "give the fixed rate" in invoke(command, "quickstart", sets=EASY).failed(2).text
