"""Attributes of engine and connector options that the rest of kvbench uses.

Core and launchers know no engines or connectors: they read these attributes and never compare names. An
engine overrides what differs from the default. No attribute has the name of an option, because pydantic
allows no field with the name of an inherited attribute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final

from pydantic import BaseModel, ConfigDict

from kvbench.core.access import ServerAccess
from kvbench.core.transfers.kv_shape import KvTensors

if TYPE_CHECKING:  # it needs numpy, which a command line that only plans must not pay for
    from kvbench.core.transfers.model import TransferModel

_EVERY_NIC: Final = frozenset({"", "all", "auto"})


@dataclass(frozen=True)
class RunningServer:
    """Address of a server that kvbench did not start."""

    base_url: str = ""
    metrics_urls: Mapping[str, str] = field(default_factory=dict)
    """Instance name, such as ``prefill-0`` → URL of its /metrics."""
    access: ServerAccess = field(default_factory=ServerAccess)


@dataclass(frozen=True)
class Simulator:
    """Command that simulates servers on virtual time (sweep/system)."""

    command: str = ""
    """Command line in shell syntax; empty: none."""
    answer_timeout_s: float = 600.0


class EngineOptions(BaseModel):
    """Engine options of the scenario file; unknown keys are refused. The defaults describe a real engine."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    # -- of the engine, for all options

    starts_processes: ClassVar[bool] = True
    """kvbench starts and stops its processes. If false, only one URL of a running server is known, not its
    instances or configuration."""
    uses_gpus: ClassVar[bool] = True
    """Its ranks take GPUs if the host has some."""
    models_compute: ClassVar[bool] = False
    """Compute time is modelled and KV is in host memory; else both are real."""
    chooses_transport: ClassVar[bool] = True
    """The engine or its transfer library chooses what a connector's options leave open."""
    kv_bytes_certain: ClassVar[bool] = False
    """The KV bytes of a request are known exactly: the last, partial block moves whole."""
    cancels_cleanly: ClassVar[bool] = False
    """Cancelling a request between P and D frees P's KV at once and affects no later trial."""
    logs_like: ClassVar[str] = "other"
    """Engine whose log patterns apply (``engine`` in deployment/diagnose.py), such as ``vllm``."""
    usual_ready_timeout_s: ClassVar[float] = 30.0
    """Default of ``ready_timeout_s``."""
    profiler_env: ClassVar[Mapping[str, str]] = {}
    """Environment that makes the engine name its steps in a profiler's timeline (nsys)."""
    tensor_parallel_only: ClassVar[bool] = False
    """An instance has only tensor parallel ranks."""

    # -- by the options

    @property
    def clips_windows(self) -> bool:
        """Whether layers with a sliding window move its last blocks only."""
        return False

    @property
    def kv_tensors(self) -> KvTensors:
        """Layout of a block's K and V that its connectors see."""
        return "apart"

    @property
    def repeats_exactly(self) -> bool:
        """Whether a prompt has the same greedy output every time; else the repeat rate is measured."""
        return self.models_compute

    @property
    def server(self) -> RunningServer:
        """Address of the running server if ``starts_processes`` is false."""
        return RunningServer()

    @property
    def simulator(self) -> Simulator:
        """Simulator that replaces the servers; then ``server`` is None."""
        return Simulator()

    @property
    def served_from(self) -> str:
        """Path or id of the model's files; empty: it needs none."""
        return ""

    @property
    def executable(self) -> str:
        """Command that starts its servers; empty: kvbench's own."""
        return ""

    @property
    def asks_version(self) -> bool:
        """Whether its host must report its version, which selects the connectors' profiles."""
        return False

    def with_version(self, version: str) -> EngineOptions:
        """Return the options with the version that a host reported."""
        return self

    def without_devices(self) -> EngineOptions:
        """Return the options without a choice of devices, for processes that each see only their own."""
        return self

    def ranks_in_args(self, role: str) -> Mapping[str, int]:
        """Return the ranks of a role that its arguments set, such as ``data_parallel_size`` → count."""
        return {}

    @property
    def instances_named(self) -> tuple[str, ...]:
        """Instances with their own options, by names such as ``prefill-1``."""
        return ()

    @property
    def gpu_memory_share(self) -> float:
        """Fraction of a GPU's memory that it takes; default: vLLM's (0.9 in older releases)."""
        return 0.92

    @property
    def kv_block_tokens(self) -> int:
        return 16

    def kv_blocks(self, longest: int) -> int | None:
        """Return an instance's KV blocks, if known; its longest request has ``longest`` tokens."""
        return None

    @property
    def answers_alike(self) -> bool:
        """Whether different prompts may have the same output, because the weights are random."""
        return False

    @property
    def slots(self) -> int | None:
        """Sequences that run at the same time (``max_num_seqs``)."""
        return None

    @property
    def step_tokens(self) -> int | None:
        """Token budget of one step (``max_num_batched_tokens``)."""
        return None

    @property
    def longest_request(self) -> int | None:
        """Largest number of input and output tokens of one request (``max_model_len``)."""
        return None

    @property
    def caches_prefixes(self) -> bool:
        return True

    @property
    def timing_profile(self) -> str:
        """Profile of the modelled step time (core/simulation/step_time.py); empty: not modelled."""
        return ""

    @property
    def time_factor(self) -> float:
        """Factor on every modelled time; 1 for real engines."""
        return 1.0

    def pace(self, backend: str) -> TransferModel | None:
        """Return the modelled time of hand-overs by a transfer backend, or None for real time.

        Raises InputError."""
        return None


class ConnectorOptions(BaseModel):
    """Connector options of the scenario file; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @property
    def reads_nic_variables(self) -> bool:
        """Whether the library takes NICs from environment variables (core/plan/processes.py: ``nic_env``)."""
        return True

    def settled(self) -> ConnectorOptions:
        """Return the options with open choices made: TCP for an engine with KV in host memory.

        Real engines choose for themselves."""
        return self

    @property
    def requested_protocol(self) -> str | None:
        """The requested protocol, if the connector has such an option."""
        return None

    @property
    def bootstrap_address(self) -> str:
        """Address where prefill instances register their ranks, if it is no server of their own."""
        return ""

    @property
    def requested_nics(self) -> tuple[str, ...]:
        """The requested NICs; empty if the library chooses."""
        return ()


def nic_names(words: str) -> tuple[str, ...]:
    """Return the NICs of a comma-separated list, each once and without its port; empty for all."""
    bare = [name.strip().partition(":")[0] for name in words.split(",")]
    return () if _EVERY_NIC & set(bare) else tuple(dict.fromkeys(bare))
