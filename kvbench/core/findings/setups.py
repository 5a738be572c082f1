"""What in the set-up of a table's rows shows in their figures, so that a reader must know of it. Pure.

- Routers that ignored prefix caches: the rates then show the routing, not the connector.
- KV that is sent over TCP although there is RDMA. One function for plan, doctor and report: devices come in
  as ``hosts.devices.rdma`` lists them.
- Tensor parallel sizes that differ, between prefill and decode or between rows. One function for plan and
  report: the ranks come in as a plan.json has them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from kvbench.core.plan.engine_count import instance_names, tensor_ranks_in
from kvbench.core.records import Finding

CACHE_BLIND: Final = (
    "its router sent a session's turns to any engine, whatever the engines had cached "
    "(deployment.routing: round_robin)"
)
"""Why no winner is named."""


def cache_blind(plan: Mapping[str, Any], label: str) -> str:
    """Return why a deployment of a run (plan.json as data) must not be named a winner; empty if it may be.

    With one engine of each role there is nothing to choose. Older plans without ``routing`` went in turn.
    """
    scenario = _mapping(plan.get("scenario"))
    sessions = _mapping(scenario.get("workload")).get("sessions")
    routing = _mapping(scenario.get("deployment")).get("routing")
    roles = Counter(name.partition("-")[0] for name in instance_names(plan, label))
    chosen = max(roles.values(), default=0) > 1
    return CACHE_BLIND if sessions is not None and chosen and routing != "session" else ""


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


_RDMA_TLS: Final = re.compile(r"all|ib|(rc|dc|ud)(_(x|v|verbs|mlx5))?|srd|gga(_mlx5)?")
"""What UCX_TLS calls transports over verbs: `ucx_info -d` and UCX's documentation."""

Command = tuple[Sequence[str], Mapping[str, str]]
"""A process's argv and environment."""


def transport_warnings(
    label: str, commands: Sequence[Command], hosts: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Iterator[Finding]:
    """Warnings where a connector's engines are told to use what their hosts' NICs do badly.

    ``hosts``: RDMA devices by host; of this machine alone the name is empty.
    """
    active = {
        f"{device['name']}{f' of {host}' if host else ''}": device
        for host, devices in hosts.items()
        for device in devices
        if any(port.get("state") == "ACTIVE" for port in device.get("ports") or ())
    }
    found = tcp_beside_rdma(label, commands, list(active))
    efa = [name for name, device in active.items() if device.get("driver") == "efa"]
    if found is not None:
        yield found
    elif efa and any(_over_ucx(argv) for argv, _ in commands):
        yield Finding(
            "ucx_over_efa",
            "warning",
            f"{label} moves its KV with UCX over EFA devices ({_shown(efa)}), where UCX emulates reads and "
            "writes in software or takes TCP",
            "choose libfabric in the connector's options: backends: [LIBFABRIC]",
            {"efa": efa},
        )


def _over_ucx(argv: Sequence[str]) -> bool:
    """Whether a command configures NIXL with UCX alone."""
    return any("Nixl" in word and "UCX" in word and "LIBFABRIC" not in word for word in argv)


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def tcp_beside_rdma(label: str, commands: Iterable[Command], active: Sequence[str]) -> Finding | None:
    """A warning where a connector's engines are told to use TCP beside these active RDMA devices."""
    told = next(filter(None, (forced_tcp(argv, env) for argv, env in commands)), "")
    if not told or not active:
        return None
    return Finding(
        "tcp_beside_rdma",
        "warning",
        f"{label} is told to move its KV over TCP ({told}), beside active RDMA devices ({_shown(active)})",
        "leave protocol or ucx_tls out, or ask for RDMA, unless TCP is what you want to measure",
        {"told": told, "rdma": list(active)},
    )


def forced_tcp(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """What in a command makes its KV go over TCP, as it stands there; empty if nothing does."""
    tls = env.get("UCX_TLS", "")
    words = [word.strip() for word in tls.removeprefix("^").split(",")]
    rdma = any(_RDMA_TLS.fullmatch(word) for word in words)
    if tls and (rdma if tls.startswith("^") else "tcp" in words and not rdma):
        return f"UCX_TLS={tls}"
    if "MC_FORCE_TCP" in env:  # its presence counts, whatever its value
        return f"MC_FORCE_TCP={env['MC_FORCE_TCP']}"
    if env.get("NCCL_IB_DISABLE", "0") not in ("0", ""):
        return f"NCCL_IB_DISABLE={env['NCCL_IB_DISABLE']}"
    return next((word for word in argv if word == "mooncake_tcp"), "")


def unequal_ranks(plan: Mapping[str, Any], labels: Iterable[str]) -> Iterator[Finding]:
    """Warnings for the deployments with these labels, which are compared with each other."""
    ranks = {label: tensor_ranks_in(plan, label) for label in labels}
    apart: dict[tuple[int, int], list[str]] = {}
    sizes: dict[tuple[int, ...], list[str]] = {}
    for label, by_instance in ranks.items():
        sizes.setdefault(tuple(sorted(set(by_instance.values()))), []).append(label)
        found = {name.partition("-")[0]: count for name, count in by_instance.items()}
        prefill, decode = found.get("prefill", 0), found.get("decode", 0)
        if prefill and decode and prefill != decode:
            apart.setdefault((prefill, decode), []).append(label)
    for (prefill, decode), named in apart.items():
        yield Finding(
            "unequal_ranks",
            "warning",
            f"{', '.join(named)}: prefill has TP {prefill} and decode TP {decode}, so heads are dealt out "
            "anew on the way, and no engine without P/D adds in the order that they do",
            "in bf16 a greedy output may honestly differ from the one that it is compared with; equal sizes "
            "leave the transfer as the only difference",
            {"prefill": prefill, "decode": decode},
        )
    sizes.pop((), None)
    if len(sizes) > 1:
        told = "; ".join(f"{_text(size)}: {', '.join(named)}" for size, named in sorted(sizes.items()))
        yield Finding(
            "unequal_ranks",
            "warning",
            f"rows are of unequal tensor parallel sizes ({told}): a difference between them is the size's as "
            "well as the connector's, per GPU too",
            "compare connectors at one size, and sizes at one connector",
            {"sizes": {label: list(size) for size, named in sizes.items() for label in named}},
        )


def _text(size: tuple[int, ...]) -> str:
    return f"TP {' and '.join(map(str, size))}"
