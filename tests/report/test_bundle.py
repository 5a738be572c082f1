"""``kvbench bundle``: what tells on whose machines a run was measured is planted everywhere, and gone."""

from __future__ import annotations

import getpass
import io
import json
import os
import socket
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from sample_run import make_run

from kvbench.errors import StoreError
from kvbench.report.bundle import BundleOptions, _json, bundle, command
from kvbench.report.scrub import Scrubber
from kvbench.report.tables.result import summary_table
from kvbench.results.run import load_run

HOSTS = ("node-a", "gpu07.cluster.example.com", "storage-3")
PLANTED = {
    "a host": "gpu07.cluster.example.com", "its short name": "gpu07", "another host": "storage-3",
    "an IPv4 address": "10.254.12.102", "an IPv6 address": "fe80::0c42:a1ff:fe65:1b2c",
    "a MAC": "0c:42:a1:65:1b:2c", "a GUID": "0c42:a103:0065:1b2c", "a user": "mlindgren",
    "a home": "/home/mlindgren/models", "a path": "/inspire/hdd/public_models",
    "a key": "sk-proj-AbCdEf0123456789abcdef", "a token": "hf_abcdefghijklmnopqrstuvwxyz012345",
    "a bearer": "eyJhbGciOiJIUzI1NiJ9.secretsecret", "a password": "hunter2hunter2",
    "a mail": "m.lindgren@example.com", "a GPU": "GPU-5b1f4d3a-12ab-34cd-56ef-0123456789ab",
}  # fmt: skip
LINE = (
    "worker on gpu07.cluster.example.com (10.254.12.102, fe80::0c42:a1ff:fe65:1b2c, 0c:42:a1:65:1b:2c) by "
    "mlindgren: loads /home/mlindgren/models/qwen.safetensors from http://storage-3:9000/bucket, gid "
    "0c42:a103:0065:1b2c, api_key=sk-proj-AbCdEf0123456789abcdef password: hunter2hunter2 "
    "HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz012345 Authorization: Bearer eyJhbGciOiJIUzI1NiJ9.secretsecret "
    "m.lindgren@example.com /inspire/hdd/public_models/Qwen3/config.json on "
    "GPU-5b1f4d3a-12ab-34cd-56ef-0123456789ab"
)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all of it in every kind of file."""
    folder = make_run(
        tmp_path_factory.mktemp("planted") / "results", connectors=("mooncake", "nixl"), input_lens=(512,)
    )
    (folder / "logs" / "prefill-gpu07.log").write_text(f"ok\n{LINE}\nGET /v1/completions 12.3 req/s\n")
    (folder / "logs" / "core.bin").write_bytes(b"\0\1" + LINE.encode())
    (folder / "logs" / "link.log").symlink_to("/etc/hostname")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest |= {"hosts": list(HOSTS), "error": LINE}
    manifest["argv"] += ["--base-url", "http://10.254.12.102:8000", "--api-key", "plainsecret"]
    (folder / "manifest.json").write_text(json.dumps(manifest).replace("/home", "\\/home"))
    environment = json.loads((folder / "environment.json").read_text())
    environment |= {
        "hostname": HOSTS[0],
        "nics": [{"name": "mlx5_0", "address": "0c:42:a1:65:1b:2c", "gid": "fe80::0c42:a1ff:fe65:1b2c"}],
        "gpu07.cluster.example.com": {"token": "plainsecret2", "free": 3},
        "libraries": {"nvidia-cublas-cu12": "12.8.4.1"},
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "scenario.yaml").write_text(f"{(folder / 'scenario.yaml').read_text()}# {LINE}\n")
    with (folder / "trials.jsonl").open("a") as lines:
        lines.write(f'{{"torn": "{LINE}')
    requests = sorted((folder / "requests").iterdir())[0]
    table = pq.read_table(requests)
    count = table.num_rows
    details = pa.array([LINE if place == 1 else "" for place in range(count)])
    place = table.schema.get_field_index("error_detail")
    table = table.set_column(place, "error_detail", details)
    table = table.append_column("hops", pa.array([["gpu07", "10.254.12.102"]] * count))
    metadata = {**(table.schema.metadata or {}), b"made_by": LINE.encode()}
    pq.write_table(table.replace_schema_metadata(metadata), requests)
    return folder


def everything(archive: Path) -> Iterator[tuple[str, str]]:
    """(name, all that can be read) of each file: text as it is, Parquet as its values and metadata."""
    with tarfile.open(archive) as tar:
        for entry in tar:
            yield entry.name, f"{entry.uname} {entry.gname} {entry.linkname}"
            file = tar.extractfile(entry) if entry.isfile() else None
            if file is None:
                continue
            data = file.read()
            if entry.name.endswith(".parquet"):
                table = pq.read_table(io.BytesIO(data))
                yield entry.name, f"{table.to_pydict()} {table.schema.metadata}"
            else:
                yield entry.name, data.decode("utf-8", "replace").replace("\\/", "/")


@pytest.fixture(scope="module")
def archive(planted: Path) -> Path:
    return bundle(planted, BundleOptions(planted.parent.parent / "out.tar.gz")).archive


def test_nothing_that_was_planted_is_left_in_any_file(archive: Path) -> None:
    assert all(value in LINE for value in PLANTED.values())
    names = [name for name in (socket.gethostname(), getpass.getuser()) if name != "root" and len(name) > 2]
    for name, text in everything(archive):
        for what, value in PLANTED.items():
            assert value.lower() not in text.lower(), f"{what} is in {name}"
            assert value.lower() not in name.lower(), f"{what} is the name {name}"
        for secret in ("plainsecret", "plainsecret2", *HOSTS, *names):
            assert secret not in text, f"{secret} is in {name}"


def test_the_pictures_are_drawn_anew_and_the_report_reads(planted: Path, archive: Path) -> None:
    before = [(row.cell, row.answer) for row in summary_table(load_run(planted))]
    out = planted.parent.parent / "unpacked"
    with tarfile.open(archive) as tar:
        tar.extractall(out, filter="data")
    (folder,) = out.iterdir()
    run = load_run(folder)
    assert [(row.cell, row.answer) for row in summary_table(run)] == before
    assert "HOST1" in (folder / "report.md").read_text()
    assert (folder / "figures" / "latency.svg").is_file()
    assert run.environment["libraries"] == {"nvidia-cublas-cu12": "12.8.4.1"}
    log = next((folder / "logs").glob("prefill*")).read_text()
    assert "GET /v1/completions 12.3 req/s" in log
    assert "/qwen.safetensors" in log
    for trial in run.trials:
        sent = run.requests(trial.trial_id)["scheduled_s"]
        assert sent.equals(load_run(planted).requests(trial.trial_id)["scheduled_s"])


def test_it_says_what_was_removed_and_what_was_left_out(planted: Path) -> None:
    out = io.StringIO()
    command(planted, BundleOptions(planted.parent.parent / "told.tar.gz"), Console(file=out, width=200))
    text = out.getvalue()
    assert "host names: " in text
    assert "10.254.12.102 → ADDRESS" in text
    assert "left out: logs/core.bin: neither text nor Parquet" in text
    assert "left out: logs/link.log: a link" in text
    assert "hunter2hunter2" not in text
    assert "plainsecret" not in text


def test_words_asked_for_go_too_and_logs_can_stay_behind(planted: Path) -> None:
    options = BundleOptions(planted.parent.parent / "words.tar.gz", also=("Qwen3",), without_logs=True)
    files = list(everything(bundle(planted, options).archive))
    assert not any(name.endswith(".log") for name, _ in files)
    assert not any("qwen3" in text.lower() for _, text in files)


def test_a_place_that_cannot_be_written_is_said(planted: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        bundle(planted, BundleOptions(tmp_path))
    with pytest.raises(StoreError):
        bundle(planted, BundleOptions(tmp_path / "none" / "x.tar.gz"))
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".bundle-")]


# --- the scrubber ----------------------------------------------------------------------------------
@pytest.mark.parametrize("text", [
    "12.3 req/s, TTFT P50 / P99 8.1/9.2 ms",
    "2026-11-21T13:30:00.123Z took 00:12:30",
    "std::vector<Foo>::push_back at 127.0.0.1:8000 and localhost",
    "GET /v1/chat/completions HTTP/1.1 200",
    "max_tokens=16 output_tokens: 128 token ids",
    "0000:00:03.0 virtio 1500 mtu",
    '<svg xmlns="http://www.w3.org/2000/svg"><path d="M 1 2 L 3/4"/></svg>',
    "see https://docs.vllm.ai/en/latest/serving.html",
])  # fmt: skip
def test_what_tells_nothing_stays(text: str) -> None:
    assert Scrubber().text(text) == text


def test_one_value_has_one_word() -> None:
    scrubber = Scrubber(hosts=["node-a", "node-b.example.com"])
    text = scrubber.text("NODE-A to node-b to node-b.example.com to 10.0.0.1, 10.0.0.2 and node-a")
    assert text == "HOST1 to HOST2 to HOST3 to ADDRESS1, ADDRESS2 and HOST1"
    assert scrubber.counts["HOST"] == 4


@given(st.text(max_size=60), st.sampled_from(sorted(PLANTED.values())), st.text(max_size=60))
def test_planted_in_any_text_it_is_gone(before: str, value: str, after: str) -> None:
    scrubber = Scrubber(hosts=HOSTS, users=["mlindgren"], words=["hunter2hunter2", "secretsecret"])
    text = scrubber.text(
        f"{before} {value}/x {after}" if value.startswith("/") else f"{before} {value} {after}"
    )
    assert value.lower() not in text.lower() or value.lower() in f"{before} {after}".lower()


VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.just("a b")


@given(st.recursive(VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.just("k"), inner)))
def test_values_without_secrets_are_as_before(value: Any) -> None:
    assert Scrubber(hosts=HOSTS).value(value) == value


PUMPS = (
    *("-", "a-", "a.", "a.-", "_", " ", "\t", "0", "1.", "::", "a:", "=", "@", "a@", "a@a.", "/", "/a",
      "/a@"),
    *("/a@", "@/a/", "://", "a://", "http://", "//", "\\", "a:\\", "a\\", "secret", "secret-", "secret "),
    *("--secret ", "--", '--secret"', "api_key", "api_key : ", "Bearer ", "Basic\t", "sk-", "GPU-", "ab:",
      "ab-"),
    *("GPU-00000000-", "-----BEGIN ", "-----BEGIN PRIVATE KEY-----", "-----END ", "/home/", "/home/a",
      "token"),
    *("--token ", "1.2.3.4 ", "1.2.3.4.", "fe80::1 ", "12:", "'", '"', "\n", "é", "user", "box-a", "box-a."),
)  # fmt: skip


@pytest.mark.parametrize("pump", PUMPS)
def test_it_takes_time_in_proportion_to_the_text(pump: str) -> None:
    """Square time would be half a minute and more."""
    text = pump * (20_000 // len(pump))
    scrubber = Scrubber(["box-a.example"], ["user"])
    began = time.process_time()
    for end in ("", "!", "x"):
        scrubber.look(text + end)
        scrubber.text(text + end)
    assert time.process_time() - began < 4


def test_a_thousand_different_names_cost_as_much_as_one() -> None:
    scrubber = Scrubber()
    began = time.process_time()
    text = " ".join(
        f"http://node-{number}.example.com and 10.0.{number // 250}.{number % 250}" for number in range(9000)
    )
    scrubber.look(text)
    clean = scrubber.text(text)
    assert time.process_time() - began < 20
    assert "node-" not in clean
    assert "10.0." not in clean


@pytest.mark.parametrize(("text", "left"), [
    ("x-my-api-key: hunter22", "hunter22"), ("run --my-secret hunter22", "hunter22"),
    ("mail +ann@example.org", "ann@example.org"), ("x.1-http://box9.example/", "box9"),
    ("9.http://box9.example/", "box9"), ("...ann.b@example.org", "ann.b"),
])  # fmt: skip
def test_what_begins_within_a_run_of_signs_goes_too(text: str, left: str) -> None:
    assert left not in Scrubber().text(text)


def test_brackets_without_end_are_text() -> None:
    for deep in ("[" * 100_000, "[" * 900 + '"me@example.org"' + "]" * 900):
        assert "me@" not in _json(deep, Scrubber())
