"""The emulated engine: real processes, HTTP and KV bytes, modelled compute time."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvbench import transfer
from kvbench.connectors.base import Connector, ConnectorOptions, moves_gpu_memory
from kvbench.core.gates.lies import LIES, Lie, labels_of
from kvbench.core.plan.processes import EMULATOR_MODULE, ProcessSpec
from kvbench.core.simulation.step_time import PROFILE_NAMES
from kvbench.engines.base import Engine, EngineOptions, FirstScenario, Installed, Instance, OptionsContext
from kvbench.engines.parts.timing_files import profile_file
from kvbench.errors import InputError, Problem

if TYPE_CHECKING:  # it imports numpy, which takes 0.1 s
    from kvbench.core.transfers.model import TransferModel

MODEL_FILE: Final = Path("tables") / "transfer_model.json"
"""Path in a run folder of ``kvbench microbench``."""
PACED: Final = "KV paced"
ON_GPU: Final = "KV in GPU memory"


class TransferFigures(BaseModel):
    """Transfer model in a scenario: start-up + per descriptor + bytes / bandwidth."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    start_ms: float = Field(0.0, ge=0, le=1e6, description="start-up time of each transfer")
    per_descriptor_us: float = Field(0.0, ge=0, le=1e6, description="time per descriptor")
    gb_per_s: float | None = Field(None, gt=0, le=1e6, description="10⁹ bytes per second; none: no limit")


class EmulatedOptions(EngineOptions):
    """Options of the emulated engine, common to prefill and decode."""

    uses_gpus = False
    tensor_parallel_only = True
    models_compute = True
    chooses_transport = False
    kv_bytes_certain = True
    cancels_cleanly = True
    logs_like = "emulated"

    timing: str = Field(
        "quick",
        max_length=4096,
        description=f"timing profile: {', '.join(PROFILE_NAMES)}, a bundled one, or a file",
    )
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
    memory: Literal["host", "cuda"] = Field(
        "host",
        description="memory of transferred KV: cuda copies it to GPU memory first, and back after arrival",
    )
    transfer_timeout_s: float = Field(10.0, gt=0, le=600, description="deadline of one KV transfer")
    transfer_like: str = Field(
        "",
        max_length=4096,
        description="a run of `kvbench microbench`: each KV transfer lasts as long as the model fitted there "
        "says, and never less than it really takes",
    )
    transfer_backend: str = Field(
        "",
        max_length=80,
        description="backend whose model is taken from transfer_like; by default the connector's",
    )
    transfer_protocol: str = Field(
        "", max_length=80, description="protocol of that model; by default the first one measured"
    )
    transfer_model: TransferFigures | None = Field(
        None, description="the same as figures, instead of transfer_like"
    )
    reasoning_tokens: int = Field(
        0, ge=0, le=1_000_000, description="number of a chat answer's first tokens that are its reasoning"
    )
    output_noise: float = Field(
        0.0,
        ge=0,
        le=0.5,
        description="share of tokens that differ when several sequences are computed together, "
        "as with kernels whose sums depend on the batch",
    )
    lie: Lie = Field(
        "", description="deliberate fault of the system under test, to test gates; marks every result"
    )

    @model_validator(mode="after")
    def _one_transfer_model(self) -> EmulatedOptions:
        if self.transfer_like and self.transfer_model is not None:
            raise ValueError("transfer_like and transfer_model cannot both be given")
        if (self.transfer_backend or self.transfer_protocol) and not self.transfer_like:
            raise ValueError(
                "transfer_backend and transfer_protocol choose from transfer_like, which is missing"
            )
        return self

    @property
    def repeats_exactly(self) -> bool:
        return not self.output_noise

    @property
    def paced(self) -> bool:
        """Whether a model determines the duration of KV transfers."""
        return bool(self.transfer_like) or self.transfer_model is not None

    def pace(self, backend: str) -> TransferModel | None:
        if not self.paced:
            return None
        from kvbench.core.transfers.model import TransferModel, model_for

        if figures := self.transfer_model:
            return TransferModel(
                "given", "", "", 0, figures.start_ms / 1e3, figures.per_descriptor_us / 1e6, figures.gb_per_s
            )
        models = _models_in(Path(self.transfer_like).expanduser())
        return model_for(models, self.transfer_backend or backend, self.transfer_protocol)

    def kv_blocks(self, longest: int) -> int:
        if self.num_blocks is not None:
            return self.num_blocks
        # 1.5 times the slots' need: P holds blocks of finished prefills until D has them.
        slots = self.max_num_seqs + self.max_num_seqs // 2
        return max(8, slots * -(-(self.max_model_len or longest) // self.block_tokens))

    @property
    def kv_block_tokens(self) -> int:
        return self.block_tokens

    @property
    def slots(self) -> int:
        return self.max_num_seqs

    @property
    def step_tokens(self) -> int:
        return self.max_num_batched_tokens

    @property
    def longest_request(self) -> int | None:
        return self.max_model_len

    @property
    def caches_prefixes(self) -> bool:
        return self.enable_prefix_caching

    @property
    def timing_profile(self) -> str:
        return self.timing

    @property
    def time_factor(self) -> float:
        return self.time_scale


class _FirstScenario(FirstScenario):
    def option_lines(
        self, model: str, longest: int, installed: Installed, gpus: Sequence[str]
    ) -> Sequence[str]:
        return ["timing: quick          # compute is modelled; KV bytes and the libraries are real"]


class Emulated(Engine):
    """Moves real KV bytes with the connector's real library; marked in every result."""

    name = "emulated"
    labels = ("emulated",)
    # The quickstart's.
    first_scenario = _FirstScenario("tiny", "256,1024,2048", 16, 250, 15, 5, 15)
    options_model = EmulatedOptions

    def labels_of(self, options: EngineOptions) -> tuple[str, ...]:
        assert isinstance(options, EmulatedOptions)
        marks = ((PACED,) if options.paced else ()) + ((ON_GPU,) if options.memory == "cuda" else ())
        return (*self.labels, *marks, *labels_of(options.lie))

    def warnings(self, options: EngineOptions, setting: OptionsContext | None = None) -> Sequence[str]:
        """Report which model paces which connector. Raises InputError for a missing model."""
        assert isinstance(options, EmulatedOptions)
        notes = []
        for label, (connector, chosen) in (setting.connectors if setting else {}).items():
            tls = connector.env("decode", chosen, None).get("UCX_TLS", "")
            if options.memory == "cuda" and not moves_gpu_memory(tls):
                notes.append(f"{label}: UCX_TLS={tls} leaves CUDA out: set its ucx_tls to cuda,tcp")
            if getattr(chosen, "extra_config", None):
                notes.append(f"{label}: extra_config applies to real engines only")
            pace = options.pace(connector.transfer_backend) if connector.kv_connector else None
            if pace is not None:
                origin = f" ({pace.way}, of {options.transfer_like})" if options.transfer_like else ""
                notes.append(
                    f"{label}: each KV transfer lasts {pace.formula()}{origin}, or as long as it really "
                    "takes if that is longer"
                )
        return notes

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
        memory = options.memory if isinstance(options, EmulatedOptions) else "host"
        if memory not in transfer.get(connector.transfer_backend).memories:
            return Problem(
                f"{connector.transfer_backend} moves no {memory} memory (engine_options.memory)",
                "omit engine_options.memory, or use the connector nixl",
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
            "tensor_parallel_size": instance.ranks.tensor,
            **({} if instance.wire_ranks == instance.ranks.tensor else {"kv_ranks": instance.wire_ranks}),
            "block_tokens": options.block_tokens,
            "num_blocks": self._num_blocks(instance, options),
            "max_num_seqs": options.max_num_seqs,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            "max_model_len": options.max_model_len or instance.max_tokens_per_request,
            "enable_prefix_caching": options.enable_prefix_caching,
            "timing": _timing(options, instance.ranks.tensor),
            "time_scale": options.time_scale,
            "kv_transfer_config": connector.kv_transfer_config(
                instance.role, instance.engine_id, connector_options
            ),
            "side_channel_port": instance.side_port,
            "transfer_timeout_s": options.transfer_timeout_s,
            **({} if options.memory == "host" else {"memory": options.memory}),
            **({"reasoning_tokens": options.reasoning_tokens} if options.reasoning_tokens else {}),
            **({"output_noise": options.output_noise} if options.output_noise else {}),
            **_kv_pace(connector, options),
            **({"lie": options.lie} if options.lie in LIES and LIES[options.lie].where == "engine" else {}),
        }
        return ProcessSpec(
            name=instance.name,
            argv=(sys.executable, "-m", EMULATOR_MODULE),
            env=connector.env(instance.role, connector_options, instance.side_port),
            spec=spec,
            ready_url=f"{instance.url}/health",
            port=instance.port,
        )

    def kv_pool_bytes(self, instance: Instance, options: EngineOptions) -> int:
        assert isinstance(options, EmulatedOptions)
        per_block = instance.model.block_bytes(options.block_tokens, instance.wire_ranks)
        return self._num_blocks(instance, options) * per_block * instance.model.regions()

    @staticmethod
    def _num_blocks(instance: Instance, options: EmulatedOptions) -> int:
        return options.kv_blocks(instance.max_tokens_per_request)


def _timing(options: EmulatedOptions, tensor_parallel_size: int) -> str | dict[str, object]:
    """Profile name, or the whole profile, as the host may lack the file."""
    found = profile_file(options.timing)
    if found is None:
        return options.timing
    found.timing(tensor_parallel_size)  # reported here instead of in a process's log
    return found.model_dump(mode="json", exclude_defaults=True)


def _kv_pace(connector: Connector, options: EmulatedOptions) -> dict[str, dict[str, float | None]]:
    pace = options.pace(connector.transfer_backend) if connector.kv_connector else None
    if pace is None:
        return {}
    return {
        "kv_pace": {
            "start_s": pace.start_s,
            "per_descriptor_s": pace.per_descriptor_s,
            "gb_per_s": pace.gb_per_s,
        }
    }


def _models_in(path: Path) -> list[TransferModel]:
    """Transfer models of a microbenchmark's run folder or file. Raises InputError."""
    file = path / MODEL_FILE if path.is_dir() else path
    hint = "transfer_like names a run folder of `kvbench microbench`; `kvbench report` rewrites its tables"
    from kvbench.core.transfers.model import models_of_json

    try:
        return models_of_json(json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(
            f"transfer_like: {file} cannot be read: {error.strerror or error}", hint=hint
        ) from None
    except ValueError:
        raise InputError(f"transfer_like: {file} is not JSON", hint=hint) from None
    except InputError as error:
        raise InputError(f"transfer_like: {file}: {error.message}", hint=error.hint or hint) from None


ENGINE = Emulated()
