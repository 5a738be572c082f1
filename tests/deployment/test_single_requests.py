"""Single requests to a server that answers late: what it compiles first, it may take its time for."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kvbench.core.records import TokenChoice
from kvbench.deployment import single_requests
from kvbench.deployment.single_requests import SingleRequests, completion_of, greedy_body
from kvbench.errors import ServerError
from kvbench.hosts import web
from kvbench.planning.overrides import CliOptions, resolve

TIMEOUT_S = 0.5
CHOICE = {"text": " a", "logprobs": {"tokens": [" a"], "token_logprobs": [0.0], "top_logprobs": [{}]}}


class Compiling(ThreadingHTTPServer):
    """Answers at once, but with log-probabilities not before it has compiled for so long after the first."""

    daemon_threads = False  # so that server_close() waits for them

    def __init__(self, compile_s: float, router: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.compile_s, self.router = compile_s, router
        self.begun: float | None = None
        self.over = threading.Event()
        self.bodies: list[dict[str, Any]] = []
        self.choice: dict[str, Any] = CHOICE


class Handler(BaseHTTPRequestHandler):
    server: Compiling

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "m", "max_model_len": 64}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        status = 200
        if "logprobs" in body:
            self.server.begun = self.server.begun or time.monotonic()
            left_s = self.server.begun + self.server.compile_s - time.monotonic()
            if self.server.router and left_s > 0.1:  # which gives its engine up before the client does
                left_s, status = 0.1, 504
            self.server.over.wait(max(0.0, left_s))
        self.answer(
            status, {"choices": [self.server.choice]} if status == 200 else {"error": {"message": "late"}}
        )

    def answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:  # who asked has gone
            return

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""


@contextmanager
def compiling(compile_s: float, *, router: bool = False) -> Iterator[tuple[SingleRequests, Compiling]]:
    server = Compiling(compile_s, router)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    sets = (f"workload.request_timeout_s={TIMEOUT_S}",)
    cli = CliOptions(base_url=url, input_len="8", output_len=2, ttft_ms=100, overrides=sets)
    try:
        scenario, _ = resolve(cli)
        with web.client() as client:
            yield SingleRequests(scenario, client, url, lambda: None, lambda: ("", "")), server
    finally:
        server.over.set()
        server.shutdown()
        thread.join(10)
        server.server_close()


@pytest.mark.parametrize("router", [False, True])
def test_the_first_log_probabilities_may_take_longer_than_a_request(router: bool) -> None:
    """As with vLLM, which compiles for them; with kvbench's router in between, which answers 504."""
    with compiling(3 * TIMEOUT_S, router=router) as (requests, server):
        found = requests.complete([[1, 2], [3, 4]], 2, scored=True)
    assert [completion.text for completion in found] == [" a", " a"]
    assert all(completion.choices for completion in found)
    assert len(server.bodies) > 2


def test_a_server_that_never_tells_them_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_requests, "COMPILE_S", 2 * TIMEOUT_S)
    with compiling(600.0) as (requests, server):
        with pytest.raises(ServerError, match=r"ReadTimeout.*request_timeout_s is 0\.5"):
            requests.complete([[1, 2]], 2, scored=True)
        assert 3 <= len(server.bodies) <= 5


def test_a_request_without_them_has_its_timeout_and_no_more() -> None:
    with compiling(600.0) as (requests, server):
        assert requests.complete([[1, 2]], 2)[0].text == " a"
        assert "logprobs" not in server.bodies[0]


def test_an_aborted_answer_is_no_right_answer() -> None:
    with compiling(0.0) as (requests, server):
        server.choice = {"text": "", "finish_reason": "abort"}
        with pytest.raises(ServerError, match="aborted the answer"):
            requests.complete([[1, 2]], 2)


def answer(text: str, **choice: Any) -> dict[str, Any]:
    return {"choices": [{"text": text, **choice}]}


LOGPROBS = {
    "tokens": [" the", " cat"],
    "token_logprobs": [-0.5, -0.1],
    "top_logprobs": [{" the": -0.5, " a": -0.9}, {" cat": -0.1}],
    "text_offset": [0, 4],
}
"""As vLLM and OpenAI answer ``logprobs`` of /v1/completions."""


def test_log_probabilities_are_asked_for_only_where_they_are_wanted() -> None:
    assert "logprobs" not in greedy_body("m", {"prompt": [1, 2]}, 16)
    assert greedy_body("m", {"prompt": [1, 2]}, 16, scored=True)["logprobs"] == 5


def test_tokens_come_with_their_rivals() -> None:
    found = completion_of(answer(" the cat", logprobs=LOGPROBS))
    assert found.text == " the cat"
    assert found.choices == (
        TokenChoice(" the", {" the": -0.5, " a": -0.9}),
        TokenChoice(" cat", {" cat": -0.1}),
    )


@pytest.mark.parametrize(
    "logprobs", [None, {}, {"tokens": [" the"]}, {"content": []}, "none", {**LOGPROBS, "tokens": 5}]
)
def test_servers_that_tell_no_log_probabilities_are_taken_as_they_are(logprobs: Any) -> None:
    assert completion_of(answer(" the cat", logprobs=logprobs)).choices == ()
    assert completion_of(answer(" the cat")).choices == ()


def test_pieces_of_a_character_end_what_can_be_placed() -> None:
    broken = {**LOGPROBS, "tokens": [" the", "\ufffd"]}
    assert [choice.token for choice in completion_of(answer(" thé", logprobs=broken)).choices] == []
    assert [choice.token for choice in completion_of(answer(" the\u20ac", logprobs=broken)).choices] == [
        " the"
    ]


@pytest.mark.parametrize("wrong", [{}, {"choices": []}, {"choices": [{}]}, {"choices": [None]}, []])
def test_what_is_no_completion_is_an_error(wrong: Any) -> None:
    with pytest.raises((LookupError, TypeError)):
        completion_of(wrong)
