"""What a scenario's options say to all of kvbench: the contract of engines and connectors, by attributes.

``core`` and the launchers know neither engines nor connectors, so what differs between these is asked of
their options, never by comparing names. An engine overrides what is not as by default. The attributes are
named unlike any option, since pydantic lets no field take the name of an inherited attribute.
"""

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
    """Where a server answers that somebody else has started."""

    base_url: str = ""
    metrics_urls: Mapping[str, str] = field(default_factory=dict)
    """Instance name, such as ``prefill-0`` → its /metrics."""
    access: ServerAccess = field(default_factory=ServerAccess)


@dataclass(frozen=True)
class Simulator:
    """A command that answers for servers on virtual time (sweep/system)."""

    command: str = ""
    """Its words as in a shell; empty: there is none."""
    answer_timeout_s: float = 600.0


class EngineOptions(BaseModel):
    """Options of an engine in the scenario file; unknown keys are refused. Defaults: a real engine's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # -- of the engine, whatever its options

    starts_processes: ClassVar[bool] = True
    """kvbench starts and stops its processes. Else a server is there, of which one URL is known, and neither
    its instances nor how they were configured."""
    uses_gpus: ClassVar[bool] = True
    """Its ranks take GPUs where a host has some."""
    models_compute: ClassVar[bool] = False
    """Its compute time is modelled and its KV lies in host memory; else both are what they are."""
    chooses_transport: ClassVar[bool] = True
    """What a connector's options leave open, it or its transfer library chooses; else they are settled."""
    kv_bytes_certain: ClassVar[bool] = False
    """The KV bytes of a request are known exactly: its last, partial block moves whole."""
    cancels_cleanly: ClassVar[bool] = False
    """A request that is cancelled between P and D gives P's KV free at once, and spoils no later trial."""
    logs_like: ClassVar[str] = "other"
    """Whose log patterns its logs fit (``engine`` in deployment/diagnose.py), such as ``vllm``."""
    usual_ready_timeout_s: ClassVar[float] = 30.0
    """``ready_timeout_s`` where the scenario says none."""
    profiler_env: ClassVar[Mapping[str, str]] = {}
    """Environment under which a profiler's timeline (nsys) names its steps."""
    tensor_parallel_only: ClassVar[bool] = False
    """An instance has tensor parallel ranks and no others."""

    # -- as the options say

    @property
    def kv_tensors(self) -> KvTensors:
        """How its connectors see K and V of a block."""
        return "apart"

    @property
    def repeats_exactly(self) -> bool:
        """The same prompt has the same greedy answer each time; else it is seen how often not."""
        return self.models_compute

    @property
    def server(self) -> RunningServer:
        """Where it answers, if ``starts_processes`` is false."""
        return RunningServer()

    @property
    def simulator(self) -> Simulator:
        """Who answers in the place of servers, if nobody serves; then there is no ``server`` either."""
        return Simulator()

    @property
    def served_from(self) -> str:
        """Path or id of the model's files; empty: it needs none."""
        return ""

    @property
    def executable(self) -> str:
        """The command that its servers are started with; empty: none but kvbench's own."""
        return ""

    @property
    def asks_version(self) -> bool:
        """Whether its version, which chooses the connectors' profiles, is for its host to report."""
        return False

    def with_version(self, version: str) -> EngineOptions:
        """The same with the version that a host has reported."""
        return self

    def without_devices(self) -> EngineOptions:
        """The same without a choice of devices, where each process sees its own alone."""
        return self

    def ranks_in_args(self, role: str) -> Mapping[str, int]:
        """Ranks of a role that its own arguments ask for: ``data_parallel_size`` and its like → how many."""
        return {}

    @property
    def instances_named(self) -> tuple[str, ...]:
        """The instances that have options of their own, by names such as ``prefill-1``."""
        return ()

    @property
    def gpu_memory_share(self) -> float:
        """The share of a GPU's memory that it takes; by default vLLM's (0.9 in older releases)."""
        return 0.92

    @property
    def kv_block_tokens(self) -> int:
        return 16

    def kv_blocks(self, longest: int) -> int | None:
        """KV blocks of one instance whose longest request has so many tokens; None: not known beforehand."""
        return None

    @property
    def answers_alike(self) -> bool:
        """Its weights are made up, so that different prompts may have the same answer."""
        return False

    @property
    def slots(self) -> int | None:
        """Sequences that run at the same time (``max_num_seqs``); None: not said."""
        return None

    @property
    def step_tokens(self) -> int | None:
        """The token budget of one step (``max_num_batched_tokens``); None: not said."""
        return None

    @property
    def longest_request(self) -> int | None:
        """Most tokens of one request, input and output (``max_model_len``); None: not said."""
        return None

    @property
    def caches_prefixes(self) -> bool:
        return True

    @property
    def timing_profile(self) -> str:
        """The profile (core/simulation/step_time.py) that its steps last by; empty: it is not modelled."""
        return ""

    @property
    def time_factor(self) -> float:
        """The factor on every modelled time; 1 for an engine whose time is real."""
        return 1.0

    def pace(self, backend: str) -> TransferModel | None:
        """How long hand-overs by a transfer backend are made to last; None: as long as they take.

        Raises InputError.
        """
        return None


class ConnectorOptions(BaseModel):
    """Options of a connector in the scenario file; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def settled(self) -> ConnectorOptions:
        """The same, with what they leave to a library chosen: TCP, for an engine with KV in host memory.

        Real engines choose for themselves; the emulated one has nobody who would.
        """
        return self

    @property
    def protocol_asked(self) -> str | None:
        """The protocol, where the connector has such an option."""
        return None

    @property
    def bootstrap_address(self) -> str:
        """Where prefill instances report their ranks, if that is no server of their own."""
        return ""

    @property
    def nics_asked(self) -> tuple[str, ...]:
        """The NICs that are named; none where the choice is the library's."""
        return ()


def nic_names(words: str) -> tuple[str, ...]:
    """The NICs of a list with commas between, each once and without its port; none where it means all."""
    bare = [name.strip().partition(":")[0] for name in words.split(",")]
    return () if _EVERY_NIC & set(bare) else tuple(dict.fromkeys(bare))
