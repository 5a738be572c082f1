"""The contract of an engine: what serves tokens, and which process to start for a role."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from kvbench.connectors.base import Connector, ConnectorOptions, Role
from kvbench.core.models import ModelShape
from kvbench.core.processes import ProcessSpec
from kvbench.transfer.base import Problem


class EngineOptions(BaseModel):
    """Options of an engine in the scenario file; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class Instance:
    """One engine instance of a deployment, with everything its process depends on."""

    name: str
    role: Role
    rank: int
    host: str
    port: int
    side_port: int | None
    engine_id: str
    model: ModelShape
    served_model_name: str
    tensor_parallel_size: int
    max_tokens_per_request: int
    """The longest input plus output of the workload."""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def bootstrap_url(self) -> str:
        return f"http://{self.host}:{self.side_port}" if self.side_port else ""


class Engine(ABC):
    """Turns an instance into a process, and says where to ask it what."""

    name: ClassVar[str]
    labels: ClassVar[tuple[str, ...]] = ()
    """Words that every table, plot and file of a result must carry, such as "emulated"."""
    options_model: ClassVar[type[EngineOptions]] = EngineOptions

    @abstractmethod
    def check(self, connector: Connector) -> Problem | None:
        """Why this engine cannot run with that connector here, or None."""

    @abstractmethod
    def process(
        self,
        instance: Instance,
        connector: Connector,
        connector_options: ConnectorOptions,
        options: EngineOptions,
    ) -> ProcessSpec:
        """The process to start for one instance."""

    def kv_pool_bytes(self, instance: Instance, options: EngineOptions) -> int:
        """Memory of one instance's KV pool, as far as kvbench decides it; 0 if it does not."""
        return 0

    def warnings(self, options: EngineOptions) -> Sequence[str]:
        """Settings known to be ignored or harmful."""
        return ()
