"""Set-ups that distort the figures of a table. Pure.

- Routers that ignored prefix caches.
- KV over TCP despite active RDMA devices (as in ``hosts.devices.rdma``).
- Tensor parallel sizes that differ between prefill and decode, or between rows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from kvbench.core.plan.engine_count import instance_names, tensor_ranks_in
from kvbench.core.records import Finding

CACHE_BLIND: Final = (
    "its router ignored the engines' caches when it placed a session's turns "
    "(deployment.routing: round_robin)"
)
"""Reason against a winner."""


def cache_blind(plan: Mapping[str, Any], label: str) -> str:
    """Return why a deployment in plan.json must not win; empty if it may. With one engine per role there is
    no routing choice. Older plans without ``routing`` used round robin."""
    scenario = _mapping(plan.get("scenario"))
    sessions = _mapping(scenario.get("workload")).get("sessions")
    routing = _mapping(scenario.get("deployment")).get("routing")
    roles = Counter(name.partition("-")[0] for name in instance_names(plan, label))
    chosen = max(roles.values(), default=0) > 1
    return CACHE_BLIND if sessions is not None and chosen and routing != "session" else ""


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


_RDMA_TLS: Final = re.compile(r"all|ib|(rc|dc|ud)(_(x|v|verbs|mlx5))?|srd|gga(_mlx5)?")
"""UCX_TLS names of transports over verbs (`ucx_info -d`, UCX documentation)."""

Command = tuple[Sequence[str], Mapping[str, str]]
"""A process's argv and environment."""


def transport_warnings(
    label: str, commands: Sequence[Command], hosts: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Iterator[Finding]:
    """Yield warnings where a connector's engines use what their hosts' NICs do badly. ``hosts``: RDMA devices
    by host; this machine's name is empty if it is the only one."""
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
            f"{label} moves its KV with UCX over EFA devices ({_listing(efa)}), where UCX emulates reads and "
            "writes in software or takes TCP",
            "choose libfabric in the connector's options: backends: [LIBFABRIC]",
            {"efa": efa},
        )


def _over_ucx(argv: Sequence[str]) -> bool:
    """Return whether a command configures NIXL with UCX alone."""
    return any("Nixl" in word and "UCX" in word and "LIBFABRIC" not in word for word in argv)


def _listing(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def tcp_beside_rdma(label: str, commands: Iterable[Command], active: Sequence[str]) -> Finding | None:
    """Return a warning where a connector's engines use TCP although these RDMA devices are active."""
    setting = next(filter(None, (forced_tcp(argv, env) for argv, env in commands)), "")
    if not setting or not active:
        return None
    return Finding(
        "tcp_beside_rdma",
        "warning",
        f"{label} is configured to move KV over TCP ({setting}) although RDMA is active ({_listing(active)})",
        "omit protocol or ucx_tls, or request RDMA, unless you want to measure TCP",
        {"told": setting, "rdma": list(active)},
    )


def forced_tcp(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """Return the setting that forces KV over TCP; empty if none."""
    tls = env.get("UCX_TLS", "")
    words = [word.strip() for word in tls.removeprefix("^").split(",")]
    rdma = any(_RDMA_TLS.fullmatch(word) for word in words)
    if tls and (rdma if tls.startswith("^") else "tcp" in words and not rdma):
        return f"UCX_TLS={tls}"
    if "MC_FORCE_TCP" in env:  # its presence counts, not its value
        return f"MC_FORCE_TCP={env['MC_FORCE_TCP']}"
    if env.get("NCCL_IB_DISABLE", "0") not in ("0", ""):
        return f"NCCL_IB_DISABLE={env['NCCL_IB_DISABLE']}"
    return next((word for word in argv if word == "mooncake_tcp"), "")


def unequal_ranks(plan: Mapping[str, Any], labels: Iterable[str]) -> Iterator[Finding]:
    """Warn about unequal tensor parallel sizes in these compared deployments."""
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
            f"{', '.join(named)}: prefill has TP {prefill} and decode TP {decode}, so KV heads are "
            "redistributed, and sums are computed in another order than without P/D",
            "in bf16 a correct greedy output may differ from the reference output; with equal sizes "
            "the transfer is the only difference",
            {"prefill": prefill, "decode": decode},
        )
    sizes.pop((), None)
    if len(sizes) > 1:
        setting = "; ".join(f"{_text(size)}: {', '.join(named)}" for size, named in sorted(sizes.items()))
        yield Finding(
            "unequal_ranks",
            "warning",
            f"rows have unequal tensor parallel sizes ({setting}): a difference may come from the size as "
            "well as from the connector, also per GPU",
            "compare connectors at one size, and sizes at one connector",
            {"sizes": {label: list(size) for size, named in sizes.items() for label in named}},
        )


def _text(size: tuple[int, ...]) -> str:
    return f"TP {' and '.join(map(str, size))}"
