"""The notes' ten blocks and the page's three tables: every figure of every cell equals the text.

The texts are read here a second time, by the plainest means, and compared with what the run folders say.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_files import imported

from kvbench import importers
from kvbench.core.records import TrialRecord
from kvbench.results.run import RunFolder, load_run

SEEDS = Path(__file__).parents[1] / "recorded" / "seeds"
REFERENCE = Path(__file__).parents[2] / "results" / "reference"

# Label of a block → where the figure stands in the summary.
LABELS: dict[str, tuple[str, ...]] = {
    "Successful requests": ("whole_run", "successful"),
    "Failed requests": ("whole_run", "failed"),
    "Request rate configured (RPS)": ("offered_rate",),
    "Benchmark duration (s)": ("whole_run", "duration_s"),
    "Total input tokens": ("whole_run", "input_tokens"),
    "Total generated tokens": ("whole_run", "output_tokens"),
    "Request throughput (req/s)": ("whole_run", "request_throughput"),
    "Output token throughput (tok/s)": ("whole_run", "output_throughput"),
    "Peak output token throughput (tok/s)": ("peak_output_tok_per_s",),
    "Peak concurrent requests": ("peak_in_flight",),
    "Total token throughput (tok/s)": ("whole_run", "total_throughput"),
    **{
        f"{word} {latency.upper()} (ms)": (f"{latency}_ms", figure)
        for latency in ("ttft", "tpot", "itl", "e2el")
        for word, figure in (
            ("Mean", "mean"), ("Median", "p50"), ("P50", "p50"), ("P90", "p90"), ("P99", "p99"),
        )
    },
}  # fmt: skip
# The page's sixteen columns after the setting and the NICs.
COLUMNS: tuple[tuple[str, ...], ...] = (
    ("whole_run", "successful"), ("whole_run", "duration_s"), ("whole_run", "input_tokens"),
    ("whole_run", "output_tokens"), ("whole_run", "request_throughput"), ("whole_run", "output_throughput"),
    ("whole_run", "total_throughput"),
    *((f"{latency}_ms", figure) for latency in ("ttft", "tpot", "itl") for figure in ("mean", "p50", "p99")),
)  # fmt: skip


def at(summary: Any, place: tuple[str, ...]) -> Any:
    for key in place:
        summary = summary[key]
    return summary


def run_of(tmp_path: Path, name: str) -> RunFolder:
    run = imported(tmp_path, SEEDS / name)
    assert not run.warnings
    return run


def source(trial: TrialRecord) -> dict[str, Any]:
    found = trial.engine["source"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("where", ["imported", "reference"])
def test_every_figure_of_the_notes(tmp_path: Path, where: str) -> None:
    lines = (SEEDS / "notes.txt").read_text(encoding="utf-8").split("\n")
    run = run_of(tmp_path, "notes.txt") if where == "imported" else load_run(REFERENCE / "seed-notes")
    trials = run.other_trials
    assert (len(trials), sum("Serving Benchmark Result" in line for line in lines)) == (10, 10)
    compared = 0
    for trial in trials:
        first, last = source(trial)["line"], source(trial)["last_line"]
        assert "Serving Benchmark Result" in lines[first - 1]
        assert lines[last - 1].startswith("=" * 40)
        for line in lines[first : last - 1]:
            label, colon, text = line.rpartition(":")
            if colon:
                assert at(trial.summary, LABELS[label]) == float(text), f"{trial.trial_id}: {line}"
                compared += 1
    assert compared == 10 * 31


def test_the_notes_say_who_how_and_on_what(tmp_path: Path) -> None:
    run = run_of(tmp_path, "notes.txt")
    rows = [
        (t.cell.connector, t.cell.input_len, t.request_rate, t.summary["planned"]) for t in run.other_trials
    ]
    assert rows == [
        ("mooncake", 1024, 80.0, 400), ("mooncake", 4096, 72.0, 360), ("mooncake", 8192, 65.0, 325),
        ("mooncake", 16384, 60.0, 300), ("mooncake", 32768, 45.0, 225),
        ("nixl", 1024, 80.0, 400), ("nixl", 4096, 72.0, 360), ("nixl", 8192, 65.0, 325),
        ("nixl", 16384, 60.0, 300), ("nixl", 32768, 35.0, 175),
    ]  # fmt: skip
    assert {trial.cell.output_len for trial in run.other_trials} == {1024}
    settings = run.other_trials[0].engine["settings"]
    assert {key: settings[key] for key in ("tp", "nics", "max_num_seqs", "kv_cache_dtype")} == {
        "tp": 8, "nics": 8, "max_num_seqs": 256, "kv_cache_dtype": "fp8",
    }  # fmt: skip
    scripts = [trial.engine["settings"]["script_request_rate"] for trial in run.other_trials]
    assert scripts == [75, 70, 65, 60, 45, 57, 57, 57, 56, 30]
    origin = run.manifest["imported"]
    assert origin["about"]["slo"] == {"ttft_ms": 5000.0, "tpot_ms": 50.0}
    assert origin["about"]["without_results"] == [{"connector": "nccl", "line": 1016, "says": "待定"}]
    assert [gpu["name"] for gpu in run.environment["gpus"]] == ["H200"] * 16
    assert run.plan["model"] == "Qwen3-30B-A3B-Instruct-2507"
    assert source(run.other_trials[0])["version"] == "0.13.0"
    assert source(run.other_trials[0])["missing"] == []


def test_the_notes_claims_are_data(tmp_path: Path) -> None:
    claims = run_of(tmp_path, "notes.txt").manifest["imported"]["claims"]
    lines = (SEEDS / "notes.txt").read_text(encoding="utf-8").split("\n")
    for claim in claims:
        assert claim["text"] in lines[claim["line"] - 1]
    values = {(c["metric"], tuple(c["input_len"])): c["values"] for c in claims if "values" in c}
    assert values == {
        ("mean_ttft_ms", (32768,)): {"mooncake": 461.0, "nixl": 2779.0},
        ("total_token_throughput", (32768,)): {"mooncake": 137500.0, "nixl": 129000.0},
    }
    ahead = [(c["ahead"], c["input_len"], c["by_percent"]) for c in claims if "by_percent" in c]
    assert ahead == [("nixl", [1024, 4096, 8192], [2.0, 5.0]), ("mooncake", [32768], [20.0, 20.0])]
    assert [c["metric"] for c in claims if c.get("equal")] == [
        "mean_tpot_ms", "mean_itl_ms", "total_token_throughput",
    ]  # fmt: skip


@pytest.mark.parametrize("where", ["imported", "reference"])
def test_every_cell_of_the_page(tmp_path: Path, where: str) -> None:
    lines = (SEEDS / "pr10884.txt").read_text(encoding="utf-8").split("\n")
    run = run_of(tmp_path, "pr10884.txt") if where == "imported" else load_run(REFERENCE / "seed-pr10884")
    held: dict[int, dict[str, int]] = {
        **{line: {"in": 1024, "rate": 2} for line in range(98, 107)},
        **{line: {"in": 1024, "tp": 4} for line in range(111, 123)},
        **{line: {"rate": 2, "tp": 4} for line in range(127, 139)},
    }
    assert [source(trial)["line"] for trial in run.other_trials] == list(held)
    compared = 0
    for trial in run.other_trials:
        line = source(trial)["line"]
        *setting, nics = lines[line - 1].split()[: -len(COLUMNS)]
        expected = held[line] | {{"tp": "tp", "qps": "rate"}.get(setting[0], "in"): int(setting[-1])}
        settings = trial.engine["settings"]
        assert (trial.cell.input_len, trial.request_rate, settings["tp"]) == (
            expected["in"],
            expected["rate"],
            expected["tp"],
        )
        assert (trial.cell.connector, trial.cell.output_len) == ("mooncake", 6)
        if nics == "TCP":
            assert settings["protocol"] == "tcp"
            assert "nics" not in settings
        else:
            assert (settings["protocol"], settings["nics"]) == ("rdma", int(nics))
        for place, text in zip(COLUMNS, lines[line - 1].split()[-len(COLUMNS) :], strict=True):
            assert at(trial.summary, place) == float(text), f"line {line}: {place}"
            compared += 1
        compared += 2
    assert compared == 33 * 18


def test_the_page_quotes_its_tables_twice_and_one_row_stands_twice(tmp_path: Path) -> None:
    origin = run_of(tmp_path, "pr10884.txt").manifest["imported"]
    repeated = [(table["line"], table["repeats_line"]) for table in origin["about"]["repeated_tables"]]
    assert repeated == [(240, 95), (253, 108), (269, 124), (292, 95), (305, 108), (321, 124)]
    (twice,) = origin["left_out"]
    assert (twice["line"], "line 115" in twice["why"]) == (131, True)
    assert origin["missing"]["num_prompts"] == origin["missing"]["failed"] == 33


def test_a_quote_that_differs_is_said(tmp_path: Path) -> None:
    lines = (SEEDS / "pr10884.txt").read_text(encoding="utf-8").split("\n")
    lines[294] = lines[294].replace("99.47", "99.74")
    lines[110] = lines[110].replace(" 98.77", "")
    path = tmp_path / "page.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    reading = importers.get("pr10884").read(path)
    messages = {problem.line: problem.text for problem in reading.problems}
    assert "differs from its first appearance at line 98" in messages[295]
    assert "does not have 16 figures" in messages[111]
    assert len(reading.rows) == 9 + 12


def test_reference_runs_name_no_place_of_a_machine() -> None:
    for folder in (path.parent for path in REFERENCE.glob("*/manifest.json")):
        for path in folder.iterdir():
            if path.suffix in (".json", ".jsonl", ".md"):
                text = path.read_text(encoding="utf-8")
                assert "/work/" not in text, path
                assert "/tmp/" not in text, path
    for name in ("seed-notes", "seed-pr10884"):
        manifest = json.loads((REFERENCE / name / "manifest.json").read_text(encoding="utf-8"))
        (file,) = manifest["imported"]["files"]
        assert len(file["sha256"]) == 64
        assert (manifest["kind"], manifest["labels"]) == ("imported", ["imported"])
