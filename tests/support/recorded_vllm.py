"""vLLM releases by recorded/vllm/flags.json; run as a program, a `vllm serve` of the release VLLM_VERSION."""

import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TABLE = Path(__file__).resolve().parents[1] / "recorded" / "vllm" / "flags.json"
MODULES = {
    "NixlConnector": "nixl", "NixlPushConnector": "nixl", "MooncakeConnector": "mooncake",
    "KvbenchMooncakeConnector": "mooncake", "P2pNcclConnector": "p2p",
}  # fmt: skip
KVBENCH_KEYS = {"KvbenchMooncakeConnector": {"rdma_devices"}}
"""Keys that a class of kvbench's own reads beside vLLM's (connectors/in_vllm)."""


@lru_cache(maxsize=1)
def table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TABLE.read_text())
    return found


def versions() -> list[str]:
    return list(table()["versions"])


@lru_cache(maxsize=256)
def recorded(kind: str, version: str) -> Mapping[str, str]:
    """Name → what the record says of it, for one release."""
    order = versions()

    def holds(ranges: str) -> bool:
        ends = [part.partition("-")[::2] for part in ranges.split(",")]
        here = order.index(version)
        return any(order.index(low) <= here <= order.index(high or low) for low, high in ends)

    found = {}
    for name, text in table()[kind].items():
        for part in text.split("; "):
            what, _, ranges = part.rpartition(" ")
            if holds(ranges):
                found[name] = what
    return found


def arguments(argv: Sequence[str], version: str) -> tuple[dict[str, str], list[str]]:
    """The flags after `serve MODEL`, and what that release's parser would refuse."""
    known, given, wrong = recorded("flags", version), {}, []
    words = list(argv[argv.index("serve") + 2 :])
    while words:
        flag = words.pop(0)
        negated = "--" + flag.removeprefix("--no-")
        kind = known.get(flag, "")
        if flag.startswith("--no-") and known.get(negated) == "bool":
            given[negated] = "false"
        elif not kind:
            wrong.append(f"{flag}: unknown to vLLM {version}")
            while words and not words[0].startswith("--"):
                words.pop(0)
        elif kind == "value":
            if not words or words[0].startswith("--"):
                wrong.append(f"{flag}: wants a value")
            else:
                given[flag] = words.pop(0)
        else:
            given[flag] = "true"
    return given, wrong


def config_problems(config: Mapping[str, Any], version: str) -> Iterator[str]:
    """Keys of a kv_transfer_config that the release, or its connector, does not read."""
    for key in config.keys() - recorded("kv_transfer_config", version).keys():
        yield f"kv_transfer_config.{key}: unknown to vLLM {version}"
    name = config["kv_connector"]
    prefix = f"{MODULES[name]}: "
    read = {key.removeprefix(prefix) for key in recorded("extra_config", version) if key.startswith(prefix)}
    for key in config["kv_connector_extra_config"].keys() - read - KVBENCH_KEYS.get(name, set()):
        yield f"kv_connector_extra_config.{key}: {name} of vLLM {version} does not read it"


def bound_ports(given: Mapping[str, str], env: Mapping[str, str], version: str) -> list[int]:
    """Every port that the ranks of one server bind, HTTP first, as the release's own sources have it."""
    tensor, pipeline, data = (
        int(given.get(f"--{kind}-parallel-size", 1)) for kind in ("tensor", "pipeline", "data")
    )
    found = [int(given["--port"])] if "--headless" not in given else []
    config = json.loads(given.get("--kv-transfer-config", "{}"))
    counts = {"rank": tensor * data, "data rank": data, "instance": 1}
    for variable, who in recorded("ports", version).items():
        if variable in env and "--headless" not in given:
            found += range(int(env[variable]), int(env[variable]) + counts[who])
    if config.get("kv_connector") == "P2pNcclConnector":  # kv_port + the rank in the world
        found += range(config["kv_port"], config["kv_port"] + tensor * pipeline * data)
    if "--master-port" in given and given["--node-rank"] == "0":
        found.append(int(given["--master-port"]))
    return found


class _Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is to be read of it."""


def main() -> None:
    version = os.environ["VLLM_VERSION"]
    given, wrong = arguments(sys.argv, version)
    if wrong:
        sys.exit("; ".join(wrong))
    http, *others = bound_ports(given, os.environ, version)
    held = [socket.create_server((given["--host"], port)) for port in others]
    server = ThreadingHTTPServer((given["--host"], http), _Health)
    print(f"ready {len(held) + 1}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
