"""The modules that are processes of their own, started as ``python -m NAME``: named here and nowhere else."""

from __future__ import annotations

from typing import Final

LOADGEN_MODULE: Final = "kvbench.processes.loadgen"
ROUTER_MODULE: Final = "kvbench.processes.router"
EMULATOR_MODULE: Final = "kvbench.processes.emulator"
EXACT_SERVER_MODULE: Final = "kvbench.processes.exact_server"
AGENT_MODULE: Final = "kvbench.processes.agent"
TRANSFER_CHILD_MODULE: Final = "kvbench.processes.transfer_worker.child"
TRANSFER_WORKER_MODULE: Final = "kvbench.processes.transfer_worker.worker"
