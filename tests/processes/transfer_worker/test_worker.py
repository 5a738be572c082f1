"""A worker by itself, over its stdin and stdout as a prefix command would have it."""

import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from kvbench.transfer.parts.blocks import pack_ids

DEADLINE_S = 20.0
LAYOUT = {"regions": 2, "blocks": 8, "block_bytes": 4096}
ALL = pack_ids(range(8))
LIMITS = {"seconds": 0.01, "min_calls": 3, "max_calls": 1000, "max_seconds": 1.0, "call_deadline_s": 1.0}


class Talk:
    """A started worker; ``ask`` waits for the answer."""

    def __init__(self, **spec: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvbench.processes.transfer_worker.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._number = 0
        usual = {"role": "target", "backend": "tcp", "options": {}, "layout": LAYOUT, "memory": "host"}
        self.say({**usual, "seed": 5, "side": 0, **spec})
        self.hello = self.hear()

    def say(self, message: Any) -> None:
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert select.select([self.process.stdout], [], [], DEADLINE_S)[0], "no answer"
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def answer(self, command: str, **content: Any) -> dict[str, Any]:
        self._number += 1
        self.say({"n": self._number, "cmd": command, **content})
        found = self.hear()
        assert found["n"] == self._number
        return found

    def ask(self, command: str, **content: Any) -> Any:
        return self.answer(command, **content)["ok"]

    def close(self) -> int:
        """Ends its stdin and waits."""
        self.process.stdin.close()
        code = self.process.wait(DEADLINE_S)
        self.process.stdout.close()
        return code


@pytest.fixture
def pair() -> Iterator[tuple[Talk, Talk]]:
    """A connected initiator and target, filled and with a prepared write of all blocks."""
    target, initiator = Talk(), Talk(role="initiator", side=1)
    try:
        peer = initiator.ask("connect", peer=target.hello["ready"]["agent"], deadline_s=5)["peer"]
        target.ask("fill", generation=0)
        initiator.ask("fill", generation=4)
        transfers = [{"peer": peer, "local": ALL, "remote": pack_ids([3, 2, 1, 0, 7, 6, 5, 4])}]
        prepared = initiator.ask("prepare", op="write", transfers=transfers)
        assert prepared["nbytes"] == 2 * 8 * 4096
        assert prepared["repeats"] is None
        yield initiator, target
    finally:
        for talk in (initiator, target):
            if talk.process.poll() is None:
                talk.process.kill()
            talk.close()


def compare(target: Talk, generation: int = 4) -> str:
    source = {"side": 1, "generation": generation, "blocks": ALL}
    found: str = target.ask("verify", blocks=pack_ids([3, 2, 1, 0, 7, 6, 5, 4]), source=source)["difference"]
    return found


def test_bytes_move_and_a_spoiled_block_is_found(pair: tuple[Talk, Talk]) -> None:
    initiator, target = pair
    assert compare(target), "nothing has moved yet"
    done = initiator.ask("run", limits=LIMITS, start_at_ns=0)
    assert done["calls"] >= 3
    assert done["ended_ns"] > done["started_ns"]
    assert done["transport"] == "tcp"
    assert compare(target) == ""
    assert compare(target, generation=3).startswith("region 0, block 3: byte 0")
    target.ask("spoil", block=6)
    assert compare(target) == "region 0, block 6: byte 4095 is not what was sent"


def test_one_worker_serves_another_layout(pair: tuple[Talk, Talk]) -> None:
    initiator, target = pair
    layout = {"regions": 1, "blocks": 2, "block_bytes": 10_000}
    agent = target.ask("reshape", layout=layout)["agent"]
    assert agent["layout"] == layout
    initiator.ask("reshape", layout=layout)
    initiator.ask("fill", generation=9)
    peer = initiator.ask("connect", peer=agent, deadline_s=5)["peer"]
    ids = pack_ids([0, 1])
    initiator.ask("prepare", op="write", transfers=[{"peer": peer, "local": ids, "remote": ids}])
    initiator.ask("run", limits=LIMITS)
    source = {"side": 1, "generation": 9, "blocks": ids}
    assert target.ask("verify", blocks=ids, source=source)["difference"] == ""
    assert target.ask("reshape", layout={**layout, "blocks": 100})["agent"] is None, "larger than its memory"


def test_counters_tell_cpu_time_and_nics(pair: tuple[Talk, Talk]) -> None:
    initiator, target = pair
    before = target.ask("counters")
    initiator.ask("run", limits={**LIMITS, "min_calls": 500})
    after = target.ask("counters")
    assert after["clock_ns"] > before["clock_ns"]
    assert after["cpu_s"] > before["cpu_s"]
    moved = after["nics"]["lo"]["received_bytes"] - before["nics"]["lo"]["received_bytes"]
    assert moved >= 500 * 2 * 8 * 4096
    assert after["cores"] >= 1


def test_nonsense_is_answered_and_survived(pair: tuple[Talk, Talk]) -> None:
    initiator, target = pair
    assert "unknown command 'dance'" in target.answer("dance")["error"]
    assert "KeyError" in target.answer("verify")["error"]
    assert "nothing is prepared" in target.answer("run", limits=LIMITS)["error"]
    target.say("no object")
    assert target.hear()["n"] == -1
    gone = Talk()
    gone.close()
    answer = initiator.answer("connect", peer=gone.hello["ready"]["agent"], deadline_s=1)
    assert "cannot reach" in answer["error"]
    initiator.ask("run", limits=LIMITS)
    assert compare(target) == ""


@pytest.mark.parametrize(
    ("spec", "cause"),
    [
        ({"backend": "nothing"}, "no transfer backend is called 'nothing'"),
        ({"memory": "paper"}, "unknown kind of memory 'paper'"),
        ({"layout": {**LAYOUT, "block_bytes": 1 << 50}}, "does not fit into this machine's memory"),
        ({"options": {"host": "203.0.113.1"}}, "cannot listen on 203.0.113.1"),
        ({"more": 1}, "must have exactly these keys"),
    ],
)
def test_what_cannot_be_opened_is_said(spec: dict[str, Any], cause: str) -> None:
    talk = Talk(**spec)
    assert cause in talk.hello["failed"]
    assert talk.close() == 1


def test_it_ends_with_its_input_even_while_it_measures(pair: tuple[Talk, Talk]) -> None:
    initiator, target = pair
    assert target.close() == 0
    assert initiator.ask("release") == {}
    null = Talk(backend="null", role="initiator")
    peer = null.ask("connect", peer={**null.hello["ready"]["agent"], "id": "x"}, deadline_s=1)["peer"]
    null.ask("prepare", op="read", transfers=[{"peer": peer, "local": ALL, "remote": ALL}])
    endless = {**LIMITS, "seconds": 3600, "max_seconds": 3600, "max_calls": 10**7}
    null.say({"n": 99, "cmd": "run", "limits": endless})
    used = psutil.Process(null.process.pid).cpu_times().user
    deadline = time.monotonic() + DEADLINE_S
    while psutil.Process(null.process.pid).cpu_times().user < used + 0.1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert null.close() == 0


def test_quit_is_answered() -> None:
    talk = Talk(backend="null")
    assert (talk.ask("quit"), talk.close()) == ({}, 0)
