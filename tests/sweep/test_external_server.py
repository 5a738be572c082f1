"""A server that somebody else started: which model, by chats, with headers, over TLS, and what is said."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from commands import EASY, invoke, kvbench, the_run
from emulated import running, spec
from hostile import DONE, HOST, TOKEN, USAGE

from kvbench.core.access import ServerAccess
from kvbench.errors import InputError, KvbenchError, ServerError
from kvbench.hosts.server_access import access_headers
from kvbench.hosts.web import status_hint
from kvbench.planning.overrides import served_model
from kvbench.processes import http1
from kvbench.processes.http1 import ReceivedRequest, Response
from kvbench.sweep.trial.idle import ALONE_REQUESTS
from tests.processes.loadgen.test_loadgen import made_certificate

LOAD = ("--rate", "20", "--input-len", "64", "--output-len", "6", "--ttft-ms", "20000")
SHORT = ("search.trial_s=1", "search.min_requests=20", "slo.attainment=0.5")
SECRET = "kvb-Canary_4711"


class Foreign:
    """An OpenAI-compatible server: ``models`` at /v1/models, or ``status`` for every request.

    Streams begin ``stream_s`` after their requests; other answers come at once.
    """

    def __init__(
        self, models: list[str], status: int = 200, stream_s: float = 0.0, longest: int | None = None
    ) -> None:
        self.models = [{"id": name, **({"max_model_len": longest} if longest else {})} for name in models]
        self.status = status
        self.stream_s = stream_s
        self.headers: list[Mapping[str, str]] = []
        self.bodies: list[dict[str, Any]] = []

    def handle(self, request: ReceivedRequest, response: Response) -> None:
        self.headers.append(dict(request.headers))
        if self.status != 200:
            response.send(self.status, b'{"error": {"message": "no"}}')
        elif request.path == "/v1/models":
            response.send(200, json.dumps({"data": self.models}).encode())
        elif request.path == "/v1/completions":
            body = json.loads(request.body)
            self.bodies.append(body)
            if not body.get("stream"):
                response.send(200, b'{"choices": [{"text": "same"}]}')
                return
            asyncio.get_running_loop().call_later(self.stream_s, self.stream, response)
        else:
            response.send(404, b"no")

    def stream(self, response: Response) -> None:
        response.start_stream()
        for event in (TOKEN, TOKEN, TOKEN, USAGE, DONE):
            response.write(event)
        response.end()


@contextmanager
def served(server: Foreign, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Its URL. TLS is ended by asyncio before it."""
    started = threading.Event()
    ports: list[int] = []
    ends: list[Callable[[], Any]] = []

    async def main() -> None:
        over = asyncio.Event()
        loop = asyncio.get_running_loop()
        ends.append(lambda: loop.call_soon_threadsafe(over.set))
        listening = await http1.serve(server.handle, HOST, 0)
        outside = None
        port = listening.port
        if tls is not None:
            outside = await asyncio.start_server(lambda r, w: _pipe(r, w, listening.port), HOST, 0, ssl=tls)
            port = outside.sockets[0].getsockname()[1]
        ports.append(port)
        started.set()
        await over.wait()
        if outside is not None:
            outside.close()
        await listening.close()

    thread = threading.Thread(target=lambda: uvloop.run(main()))
    thread.start()
    assert started.wait(10)
    yield f"http{'s' if tls else ''}://{HOST}:{ports[0]}"
    ends[0]()
    thread.join(10)


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    inner_reader, inner_writer = await asyncio.open_connection(HOST, port)

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.close()

    await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))


def requests_of(folder: Path) -> Any:
    run = the_run(folder)
    return run, run.requests(run.all_trials[0].trial_id)


@pytest.mark.parametrize("reasoning", [0, 3])
def test_a_server_is_measured_by_chats_of_the_length_asked_for(tmp_path: Path, reasoning: int) -> None:
    with running(tmp_path, spec(reasoning_tokens=reasoning)) as engine:
        done = kvbench(
            *("bench", "--base-url", engine.url, *LOAD, "--endpoint", "chat", "--output",
              str(tmp_path / "r")),
            sets=SHORT,
        )  # fmt: skip
        assert engine.metric("vllm:prompt_tokens_total", engine="0", model_name="tiny") > 0
    run, rows = requests_of(tmp_path / "r")
    assert set(rows["error"]) == {""}, done.text
    assert (set(rows["prompt_tokens"]), set(rows["output_len"])) == ({64}, {6})
    assert rows["first_token_s"].gt(0).all()
    assert rows["text_bytes"].gt(6 * len(" t1")).all(), "reasoning is text, too"
    assert f"tiny at {engine.url}" in done.out, "model and URL stand in the header"
    assert "starting" not in done.out
    assert not [finding for finding in run.all_trials[0].findings if finding.gate == "wrong_prompt_length"]


@pytest.mark.parametrize("mode", ["router", "direct"])
def test_pairs_are_measured_by_chats_as_by_completions(tmp_path: Path, mode: str) -> None:
    done = kvbench(
        *("sweep", "quickstart", "--connector", "tcp", "--output", str(tmp_path)),
        sets=(*EASY, "load.endpoint=chat", f"load.mode={mode}"),
    )
    run, rows = requests_of(tmp_path)
    assert set(rows["error"]) <= {"", "cancelled"}, done.text
    assert (rows[rows["error"] == ""]["prompt_tokens"] == 64).all()
    (cell,) = [result for result in run.cells if result.cell.connector == "tcp"]
    assert cell.status == "done", done.text


def test_of_several_models_one_must_be_named() -> None:
    with served(Foreign(["first", "org/second"])) as url:
        with pytest.raises(InputError, match=r"2 models.*first, org/second") as caught:
            served_model(url, ServerAccess())
        assert "--model first" in caught.value.hint
        assert served_model(url, ServerAccess(), "org/second") == ("org/second", None)
        with pytest.raises(InputError, match="no model 'third'"):
            served_model(url, ServerAccess(), "third")
    with served(Foreign([])) as url, pytest.raises(ServerError, match="empty list"):
        served_model(url, ServerAccess())


@pytest.mark.parametrize(("status", "hint"), [
    (401, "--api-key-env"), (403, "permissions"), (404, "where /v1 begins"), (429, "rate limit"),
    (302, "redirects"), (500, "log"), (503, "log"),
])  # fmt: skip
def test_a_status_has_its_own_hint(status: int, hint: str) -> None:
    with served(Foreign(["m"], status)) as url, pytest.raises(ServerError, match=str(status)) as caught:
        served_model(url, ServerAccess())
    assert hint in caught.value.hint
    assert "developer.mozilla" not in str(caught.value)


def test_a_key_that_was_sent_and_refused_is_not_asked_for_again() -> None:
    assert "refuses the key" in status_hint(401, sent_key=True)


def test_tls_is_believed_by_file_or_not_at_all_and_said_so(tmp_path: Path) -> None:
    key, certificate = made_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    with served(Foreign(["m"]), context) as url:
        with pytest.raises(ServerError) as caught:
            served_model(url, ServerAccess())
        assert "--ca-file" in caught.value.hint
        assert served_model(url, ServerAccess(ca_file=str(certificate))) == ("m", None)
        assert served_model(url, ServerAccess(insecure=True)) == ("m", None)
        for trusting in (("--ca-file", str(certificate)), ("--insecure",)):
            done = kvbench(
                *("bench", "--base-url", url, *LOAD, "--output-len", "3", *trusting),
                *("--output", str(tmp_path / trusting[0])),
                sets=SHORT,
            )
            _, rows = requests_of(tmp_path / trusting[0])
            assert set(rows["error"]) == {""}, done.text
        with pytest.raises(ServerError) as caught:
            served_model(url.replace("https", "http"), ServerAccess())
        assert "https://" in caught.value.hint
    with served(Foreign(["m"])) as url, pytest.raises(ServerError) as caught:
        served_model(url.replace("http", "https"), ServerAccess())
    assert "http://" in caught.value.hint
    with pytest.raises(InputError, match="cannot be used"):
        served_model("https://127.0.0.1:9", ServerAccess(ca_file=str(tmp_path / "none.pem")))


def test_the_idle_latency_is_that_of_streamed_requests(tmp_path: Path) -> None:
    """Such a server was reported as overloaded: it looked idle with an answer at once."""
    server = Foreign(["m"], stream_s=0.3)
    with served(server) as url:
        done = kvbench(
            *("bench", "--base-url", url, *LOAD, "--output-len", "3", "--output", str(tmp_path)), sets=SHORT
        )
    run = the_run(tmp_path)
    assert run.outputs[0]["latency_s"] >= 0.3, done.text
    alone = [body for body in server.bodies if body.get("stream")][:ALONE_REQUESTS]
    assert {(body["max_tokens"], len(body["prompt"])) for body in alone} == {(3, 64)}
    assert len({tuple(body["prompt"]) for body in alone}) == len(alone), "no prefix cache answers for it"


def test_headers_reach_the_server_and_their_secrets_stand_nowhere(tmp_path: Path) -> None:
    server = Foreign(["m"])
    with served(server) as url:
        done = kvbench(
            *("bench", "--base-url", url, *LOAD, "--output-len", "3", "--output", str(tmp_path)),
            *("--header", "X-Tenant: blue", "--header", "X-Api-Key: ${DOOR_KEY}"),
            sets=SHORT,
            env={"DOOR_KEY": SECRET},
        )
    assert server.bodies, done.text
    assert {header.get("x-tenant") for header in server.headers} == {"blue"}
    assert {header.get("x-api-key") for header in server.headers} == {SECRET}
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


@pytest.mark.parametrize(("words", "message"), [
    (("--header", "X-Api-Key: plain"), "looks like a secret"),
    (("--header", "no colon"), "NAME: VALUE"),
    (("--header", "Host: other"), "kvbench's own"),
    (("--endpoint", "embeddings"), "endpoint"),
])  # fmt: skip
def test_what_cannot_be_sent_is_refused_before_anything_runs(words: tuple[str, ...], message: str) -> None:
    with served(Foreign(["m"])) as url:
        done = invoke("bench", "--base-url", url, *LOAD, *words)
    assert done.status == 2
    assert message in done.err


def test_options_for_a_server_need_one() -> None:
    done = invoke("plan", "quickstart", "--model", "m", "--insecure").failed(2)
    assert "--model, --insecure go with a --base-url" in done.err


def test_a_plan_of_a_server_takes_what_a_sweep_takes() -> None:
    with served(Foreign(["org/m"])) as url:
        done = invoke(
            *("plan", "--base-url", url, "--input-len", "128,256", "--output-len", "32", "--tpot-ms", "50")
        )
    assert done.status == 0, done.text
    assert f"org/m at {url}" in done.out
    assert "256" in done.out


def test_an_unset_variable_of_a_header_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOOR_KEY", raising=False)
    with pytest.raises(KvbenchError, match="DOOR_KEY, which header x names"):
        access_headers(ServerAccess(headers={"x": "${DOOR_KEY}"}))


def test_requests_longer_than_the_server_accepts_are_refused_before_they_are_sent(tmp_path: Path) -> None:
    load = ("--input-len", "128,300", "--output-len", "16", "--tpot-ms", "50")
    with served(Foreign(["m"], longest=256)) as url:
        done = invoke("plan", "--base-url", url, *load).failed(2)
        assert "input_len 300 and output_len 16 together exceed the engine's max_model_len of 256" in done.err
        assert invoke("plan", "--base-url", url, *load, "--input-len", "240").status == 0
        file = tmp_path / "mine.yaml"
        assert invoke("init", str(file), "--yes", "--base-url", url).status == 0
        assert "    max_model_len: 256\n" in file.read_text()
        assert "  input_len: [128]\n" in file.read_text(), "as many tokens as fit with the 128 of the answer"
        checked = invoke(
            "doctor", str(file), "--set", "deployment.engine_options.max_model_len=null", "--set",
            "workload.input_len=[200]",
        ).text  # fmt: skip
        assert "the server's max_model_len is 256" in " ".join(checked.split())
