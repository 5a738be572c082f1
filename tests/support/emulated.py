"""Starts emulated engines as real processes for the tests, and takes every one of them down again."""

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kvbench import connectors
from kvbench.connectors.base import PrefillPeer

MODEL = {"name": "tiny", "layers": 4, "kv_heads": 2, "head_dim": 64, "kv_dtype": "bf16", "vocab_size": 8192}
LOCAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
PORTS_FROM = 10_000
_CHANCE = random.SystemRandom()  # not of hypothesis, which has all tests begin with the same numbers
READY_DEADLINE_S = 30.0
STOP_DEADLINE_S = 15.0


def free_port() -> int:
    """A port that is free now, and that no connection gets by chance before somebody listens on it.

    What the kernel deals out, to connections of tests beside this one too, is of its range of local ports.
    """
    lowest = int(LOCAL_PORTS.read_text().split()[0])
    while True:
        port = _CHANCE.randrange(PORTS_FROM, lowest) if lowest > 2 * PORTS_FROM else 0
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            return int(sock.getsockname()[1])


def spec(**changes: Any) -> dict[str, Any]:
    """A small, fast engine's spec."""
    base = {
        "served_model_name": "tiny", "port": free_port(), "model": MODEL, "num_blocks": 512,
        "max_num_seqs": 32, "max_num_batched_tokens": 512, "max_model_len": 4096, "timing": "quick",
        "time_scale": 0.1, "transfer_timeout_s": 8.0,
    }  # fmt: skip
    return {**base, **changes}


def greedy(prompt: Any, max_tokens: int, **more: Any) -> dict[str, Any]:
    """The body of a request for so many tokens, to be answered with their ids."""
    return {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True, **more}


@dataclass
class EngineProcess:
    """A running engine."""

    process: subprocess.Popen[bytes]
    spec: dict[str, Any]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.spec['port']}"

    def post(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        return httpx.post(self.url + path, json=dict(body), headers=headers, timeout=60)

    def refused(self, body: Mapping[str, Any], status: int, words: str) -> None:
        """Ask for a completion; require this status, and the words in its error."""
        reply = self.post("/v1/completions", body)
        assert reply.status_code == status, reply.text
        assert words in reply.json()["error"]["message"]

    def complete(self, prompt: Any, max_tokens: int = 8, **more: Any) -> dict[str, Any]:
        """A greedy completion with token ids; asserts success."""
        reply = self.post("/v1/completions", greedy(prompt, max_tokens, **more))
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def tokens(self, prompt: Any, max_tokens: int = 8, **more: Any) -> list[int]:
        ids: list[int] = self.complete(prompt, max_tokens, **more)["choices"][0]["token_ids"]
        return ids

    def tokens_together(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 8, **more: Any
    ) -> list[list[int]]:
        """What the engine answers to requests that are all in its sockets before it reads the first.

        It is stopped while they are sent, so how slow a client is does not matter.
        """
        with contextlib.ExitStack() as stack:
            self.process.send_signal(signal.SIGSTOP)
            stack.callback(self.process.send_signal, signal.SIGCONT)
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)
            opened = []
            for prompt in prompts:
                connection = http.client.HTTPConnection("127.0.0.1", self.spec["port"], timeout=60)
                stack.callback(connection.close)
                connection.request("POST", "/v1/completions", json.dumps(greedy(prompt, max_tokens, **more)))
                opened.append(connection)
            self.process.send_signal(signal.SIGCONT)
            replies = [((reply := connection.getresponse()).status, reply.read()) for connection in opened]
        assert {status for status, _ in replies} == {200}, replies
        return [json.loads(body)["choices"][0]["token_ids"] for _, body in replies]

    def metric(self, name: str, **labels: str) -> float:
        """The value of one sample of /metrics."""
        for line in httpx.get(self.url + "/metrics", timeout=10).text.splitlines():
            match = re.fullmatch(r"([^{\s]+)\{(.*)\} (\S+)", line)
            if (
                match
                and match[1] == name
                and all(f'{key}="{value}"' in match[2] for key, value in labels.items())
            ):
                return float(match[3])
        raise KeyError(name)

    def wait_metric(self, name: str, value: float, deadline_s: float = 10.0) -> None:
        """Waits until a sample has that value."""
        end = time.monotonic() + deadline_s
        while (seen := self.metric(name)) != value:
            assert time.monotonic() < end, f"{name} is {seen}, not {value}"
            time.sleep(0.02)

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and waits; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(STOP_DEADLINE_S)


def launch(
    folder: Path, engine_spec: Mapping[str, Any], env: Mapping[str, str] | None = None
) -> EngineProcess:
    """Starts an engine process; the caller stops it."""
    port = engine_spec["port"]
    path, log = folder / f"engine-{port}.json", folder / f"engine-{port}.log"
    path.write_text(json.dumps(engine_spec))
    with log.open("ab") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvbench.processes.emulator", str(path)], stdin=subprocess.DEVNULL,
            stdout=stream, stderr=stream, env={**os.environ, **(env or {})},
        )  # fmt: skip
    return EngineProcess(process, dict(engine_spec), log)


def wait_ready(engine: EngineProcess) -> None:
    end = time.monotonic() + READY_DEADLINE_S
    while time.monotonic() < end:
        assert engine.process.poll() is None, engine.log.read_text()
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(engine.url + "/health", timeout=5).status_code == 200:
                return
        time.sleep(0.02)
    raise AssertionError(f"not ready: {engine.log.read_text()}")


@contextlib.contextmanager
def running(folder: Path, *specs: Mapping[str, Any], env: Mapping[str, str] | None = None) -> Iterator[Any]:
    """Engines that are ready; one, or a list of several."""
    engines: list[EngineProcess] = []
    try:
        for item in specs:
            engines.append(launch(folder, item, env))
        for engine in engines:
            wait_ready(engine)
        yield engines[0] if len(engines) == 1 else engines
    finally:
        for engine in engines:
            if engine.process.poll() is None:
                engine.process.send_signal(signal.SIGCONT)
        for engine in engines:
            try:
                engine.stop()
            except subprocess.TimeoutExpired:
                engine.process.kill()
                engine.process.wait()
                raise


def pair_specs(connector: str, **changes: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """The specs of P and D for a connector of kvbench.connectors, and their environment."""
    chosen = connectors.get(connector)
    options = chosen.options_model().settled()
    extra = changes.pop("extra", {})
    result = []
    env: dict[str, str] = {}
    for role, engine_id in (("prefill", "engine-p"), ("decode", "engine-d")):
        config = chosen.kv_transfer_config(role, engine_id, options)  # type: ignore[arg-type]
        config["kv_connector_extra_config"].update(extra)
        side = free_port() if role in chosen.side_port_roles else None
        result.append(spec(kv_transfer_config=config, side_channel_port=side, **changes))
        env.update(chosen.env(role, options, side))  # type: ignore[arg-type]
    return result[0], result[1], env


class Pair:
    """P and D with a minimal router in front, made of the connector's own dispatch functions."""

    def __init__(self, connector: str, prefill: EngineProcess, decode: EngineProcess) -> None:
        self.connector = connectors.get(connector)
        self.prefill = prefill
        self.decode = decode
        self._count = 0

    def peer(self) -> PrefillPeer:
        if not self.connector.needs_bootstrap:
            return PrefillPeer(self.prefill.url)
        bootstrap = f"http://127.0.0.1:{self.prefill.spec['side_channel_port']}"
        engine_id = httpx.get(bootstrap + "/query", timeout=5).json()["0"]["engine_id"]
        return PrefillPeer(self.prefill.url, bootstrap, engine_id)

    def refused(self, body: Mapping[str, Any], answer: Any, name: str, words: str) -> None:
        """Ask D for what P answered; it must fail with these words."""
        request = self.connector.decode_request(body, answer, name, self.peer())
        self.decode.refused(request, 500, words)

    def post(self, body: Mapping[str, Any]) -> httpx.Response:
        """One request through both."""
        self._count += 1
        name, peer = f"request-{self._count}", self.peer()
        first = self.connector.prefill_request(body, name, peer)
        path, headers = "/v1/completions", {"X-Request-Id": name}
        if self.connector.dispatch == "sequential":
            answer = self.prefill.post(path, first, headers)
            assert answer.status_code == 200, answer.text
            assert not self.connector.missing_in_prefill_response(answer.json())
            return self.decode.post(
                path, self.connector.decode_request(body, answer.json(), name, peer), headers
            )
        # Concurrent: P's request goes out first and its answer is read last.
        with httpx.Client(timeout=60) as client, contextlib.ExitStack() as stack:
            sent = client.build_request("POST", self.prefill.url + path, json=first, headers=headers)
            prefill = stack.enter_context(_in_background(client, sent))
            reply = self.decode.post(path, self.connector.decode_request(body, None, name, peer), headers)
            prefill.join(30)
        return reply

    def tokens(self, prompt: Any, max_tokens: int = 8, **more: Any) -> list[int]:
        reply = self.post(greedy(prompt, max_tokens, **more))
        assert reply.status_code == 200, reply.text
        ids: list[int] = reply.json()["choices"][0]["token_ids"]
        return ids


@contextlib.contextmanager
def _in_background(client: httpx.Client, request: httpx.Request) -> Iterator[Any]:
    import threading

    thread = threading.Thread(target=client.send, args=(request,), daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(30)


@contextlib.contextmanager
def running_pair(folder: Path, connector: str, **changes: Any) -> Iterator[Pair]:
    """A ready P/D pair."""
    prefill, decode, env = pair_specs(connector, **changes)
    with running(folder, prefill, decode, env=env) as (p, d):
        yield Pair(connector, p, d)
