"""Simulators of somebody else's, as `kvbench simulate --system` asks them: small, and of known truth."""

import math
import shlex
import sys
from pathlib import Path

QUEUE = '''
"""An M/D/1 queue: SERVICE_S [abort]. With abort it drops what the client gives up, else it works on it."""
import json
import sys

service_s, aborts = float(sys.argv[1]), sys.argv[2:] == ["abort"]
free_s = 0.0
for line in sys.stdin:
    told = json.loads(line)
    if told["type"] == "trial":
        start_s, arrivals, before_s = told["starts_at_s"], told["arrivals_s"], free_s - told["starts_at_s"]
        firsts, at_s = [], before_s
        for arrival_s in arrivals:
            at_s = max(at_s, arrival_s) + service_s
            firsts.append(at_s)
        print(json.dumps({"first_token_s": firsts, "last_token_s": firsts}), flush=True)
        continue
    gone, at_s = set(told["cancelled"]) if aborts else (), before_s
    for place, arrival_s in enumerate(arrivals):
        began_s = max(at_s, arrival_s)
        if arrival_s <= told["cut_at_s"] and not (place in gone and began_s >= told["ended_at_s"]):
            at_s = began_s + service_s
    free_s = max(free_s, start_s + at_s)
'''

ECHO = '''
"""Each request takes LATENCY_S, however many there are; what it is told goes to a file."""
import json
import sys

latency_s, log = float(sys.argv[1]), open(sys.argv[2], "a")
for line in sys.stdin:
    told = json.loads(line)
    log.write(line)
    log.flush()
    if told["type"] == "trial":
        times = [each + latency_s for each in told["arrivals_s"]]
        print(json.dumps({"first_token_s": times, "last_token_s": times}), flush=True)
'''


def command(tmp_path: Path, code: str, *words: object, name: str = "simulator.py") -> str:
    """A command that runs the code."""
    path = tmp_path / name
    path.write_text(code)
    return shlex.join([sys.executable, str(path), *map(str, words)])


def md1_waits_share(rho: float, services: float) -> float:
    """P(wait ≤ services × service time) of M/D/1 (Erlang)."""
    terms = (
        (rho * (k - services)) ** k / math.factorial(k) * math.exp(-rho * (k - services))
        for k in range(int(services) + 1)
    )
    return (1 - rho) * sum(terms)


def md1_rate(service_s: float, ttft_s: float, share: float) -> float:
    """The highest rate at which that share of requests has its only token within ``ttft_s``."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        met = md1_waits_share(middle, ttft_s / service_s - 1) >= share
        low, high = (middle, high) if met else (low, middle)
    return low / service_s
