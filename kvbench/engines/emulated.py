"""The emulated engine: real processes, HTTP and KV bytes; only compute time is modelled."""

from __future__ import annotations

import sys

from pydantic import Field

from kvbench import transfer
from kvbench.connectors.base import Connector, ConnectorOptions
from kvbench.core.lies import LIES, Lie, labels_of
from kvbench.core.processes import ProcessSpec
from kvbench.core.timing import PROFILE_NAMES
from kvbench.engines.base import Engine, EngineOptions, Instance
from kvbench.transfer.base import Problem


class EmulatedOptions(EngineOptions):
    """Options of the emulated engine, the same for prefill and decode instances."""

    timing: str = Field("quick", description=f"timing profile: {', '.join(PROFILE_NAMES)}")
    time_scale: float = Field(
        1.0, gt=0, le=1000, description="factor on every modelled time; 0.1 is ten times faster"
    )
    block_tokens: int = Field(16, ge=1, le=1024, description="tokens per KV block")
    num_blocks: int | None = Field(
        None, ge=8, description="KV blocks per instance; by default enough for every slot at full length"
    )
    max_num_seqs: int = Field(64, ge=1, le=4096, description="sequences that run at the same time")
    max_num_batched_tokens: int = Field(2048, ge=16, description="token budget of one step")
    max_model_len: int | None = Field(
        None, ge=16, description="longest input plus output; by default the workload's"
    )
    enable_prefix_caching: bool = Field(True, description="prefix cache, on by default as in vLLM")
    transfer_timeout_s: float = Field(10.0, gt=0, le=600, description="deadline of one KV transfer")

    def blocks(self, longest: int) -> int:
        """KV blocks of one instance whose longest request has so many tokens, prompt and output."""
        if self.num_blocks is not None:
            return self.num_blocks
        # Half as much again as all slots need: P holds blocks of finished prefills until D has them.
        slots = self.max_num_seqs + self.max_num_seqs // 2
        return max(8, slots * -(-(self.max_model_len or longest) // self.block_tokens))

    lie: Lie = Field(
        "", description="what the system under test is to lie about, to see it caught; marks every result"
    )


class Emulated(Engine):
    """Moves real KV bytes through the connector's real library; marked in every result."""

    name = "emulated"
    labels = ("emulated",)
    options_model = EmulatedOptions

    def labels_of(self, options: EngineOptions) -> tuple[str, ...]:
        assert isinstance(options, EmulatedOptions)
        return (*self.labels, *labels_of(options.lie))

    def router_lie(self, options: EngineOptions) -> str:
        assert isinstance(options, EmulatedOptions)
        return options.lie if options.lie in LIES and LIES[options.lie].where == "router" else ""

    def check(self, connector: Connector, options: EngineOptions | None = None) -> Problem | None:
        if not connector.kv_connector:
            return None
        if not connector.transfer_backend:
            return Problem(
                f"the emulated engine cannot move KV for the connector {connector.name}",
                f"measure {connector.name} with a real engine: deployment.engine: vllm",
            )
        return transfer.check(connector.transfer_backend)

    def process(
        self,
        instance: Instance,
        connector: Connector,
        connector_options: ConnectorOptions,
        options: EngineOptions,
    ) -> ProcessSpec:
        assert isinstance(options, EmulatedOptions)
        model = instance.model
        spec = {
            "served_model_name": instance.served_model_name,
            "host": instance.host,
            "port": instance.port,
            "model": {
                "name": model.name,
                "layers": model.layers,
                "kv_heads": model.kv_heads,
                "head_dim": model.head_dim,
                "kv_dtype": model.kv_dtype,
                "mla_dim": model.mla_dim,
                "vocab_size": model.vocab_size,
            },
            "tensor_parallel_size": instance.tensor_parallel_size,
            "block_tokens": options.block_tokens,
            "num_blocks": self._num_blocks(instance, options),
            "max_num_seqs": options.max_num_seqs,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            "max_model_len": options.max_model_len or instance.max_tokens_per_request,
            "enable_prefix_caching": options.enable_prefix_caching,
            "timing": options.timing,
            "time_scale": options.time_scale,
            "kv_transfer_config": connector.kv_transfer_config(
                instance.role, instance.engine_id, connector_options
            ),
            "side_channel_port": instance.side_port,
            "transfer_timeout_s": options.transfer_timeout_s,
            **({"lie": options.lie} if options.lie in LIES and LIES[options.lie].where == "engine" else {}),
        }
        return ProcessSpec(
            name=instance.name,
            argv=(sys.executable, "-m", "kvbench.emulator"),
            env=connector.env(instance.role, connector_options, instance.side_port, instance.host),
            spec=spec,
            ready_url=f"{instance.url}/health",
            port=instance.port,
        )

    def kv_pool_bytes(self, instance: Instance, options: EngineOptions) -> int:
        assert isinstance(options, EmulatedOptions)
        per_block = instance.model.block_bytes(options.block_tokens, instance.tensor_parallel_size)
        return self._num_blocks(instance, options) * per_block * instance.model.regions()

    @staticmethod
    def _num_blocks(instance: Instance, options: EmulatedOptions) -> int:
        return options.blocks(instance.max_tokens_per_request)


ENGINE = Emulated()
