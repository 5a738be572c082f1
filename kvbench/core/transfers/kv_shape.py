"""The transfer that an engine makes of one request's KV cache: which descriptors, how many bytes.

An instance's cache is one tensor for each layer and for keys and values (one for each layer with MLA),
cut into blocks of ``block_tokens`` tokens; each tensor-parallel rank keeps its own heads and moves them
itself. So one rank moves ``regions × blocks`` pieces of ``block_tokens · heads of the rank · head_dim ·
bytes`` each.

vLLM's NixlConnector hands over one descriptor for each piece (vllm#34054 logs 313 MB in 40,064 of 8 KiB);
its MooncakeConnector, and kvbench's own tcp, merge pieces that lie side by side on both sides into runs, so
that blocks which the engine handed out in a row make one descriptor for each region. A store gets one object
for each block, of all its regions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvbench.core.physics.model_shapes import DTYPE_BYTES, MODELS, ModelShape
from kvbench.core.transfers.cases import MEMORY_SHARE
from kvbench.errors import InputError

MERGING: Final[Mapping[str, bool]] = {
    "mooncake": True,
    "tcp": True,
    "shm": True,
    "memcpy": True,
    "nixl": False,
    "null": False,
}
"""Whether the connector that a backend stands for merges neighbouring blocks; backends not listed do not."""

WHOLE_BLOCKS: Final = frozenset({"mooncake_store", "yuanrong", "omni"})
"""Stores, in which one object holds a block of all layers: vLLM's MooncakeStoreConnector puts the pieces of a
block under the one key of its hash."""

MODEL_NAMES: Final = tuple(MODELS)


@dataclass(frozen=True)
class KvWork:
    """One request's KV cache at one tensor-parallel rank, or at all of them at once (``ranks`` of them)."""

    model: ModelShape
    input_len: int
    tensor_parallel_size: int
    block_tokens: int
    ranks: int = 1

    @property
    def regions(self) -> int:
        return self.model.regions()

    @property
    def blocks(self) -> int:
        """In each region; the last one moves whole."""
        return self.model.blocks(self.input_len, self.block_tokens)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one region at one rank."""
        heads = max(1, self.model.kv_heads // self.tensor_parallel_size)
        width = self.model.mla_dim or heads * self.model.head_dim
        return self.block_tokens * width * DTYPE_BYTES[self.model.kv_dtype]

    @property
    def descriptors(self) -> int:
        """Of one rank where nothing is merged."""
        return self.regions * self.blocks

    @property
    def rank_bytes(self) -> int:
        """Bytes that one rank moves."""
        return self.descriptors * self.block_bytes

    @property
    def wire_bytes(self) -> int:
        """Bytes that all ranks of the instance move for this request."""
        return self.rank_bytes * self.tensor_parallel_size

    @property
    def request_bytes(self) -> int:
        """KV bytes of the request, each once: without copies on other ranks and the last block's rest."""
        return self.model.kv_bytes_per_token() * self.input_len

    @property
    def logical_bytes(self) -> int:
        """Of ``request_bytes``, what one rank's transfer stands for."""
        return self.request_bytes // self.tensor_parallel_size

    @property
    def memory_bytes(self) -> int:
        """Bytes of both sides' buffers, of all ranks that move at once."""
        return 2 * self.rank_bytes * self.ranks

    def shape(self) -> str:
        """As in ``Case.shape``."""
        which = f"{self.ranks} ranks" if self.ranks > 1 else "rank 1"
        return f"{self.model.name} {self.input_len} tokens, {which} of {self.tensor_parallel_size}"

    def words(self) -> list[str]:
        """What the numbers stand for, a sentence each."""
        tp, gb = self.tensor_parallel_size, 1e9
        factor = self.model.wire_factor(tp)
        parts = "layers (MLA)" if self.model.mla_dim else "layers × keys and values"
        copies = f", each KV head is on {factor} ranks" if factor > 1 and not self.model.mla_dim else ""
        copies = ", each rank keeps all of it" if factor > 1 and self.model.mla_dim else copies
        lines = [
            f"{self.model.name} ({self.model.kv_dtype}), {self.input_len} tokens: {self.regions} regions "
            f"({parts}) × {self.blocks} blocks of {self.block_tokens} tokens = {self.descriptors} pieces of "
            f"{self.block_bytes} bytes at each of {tp} ranks",
            f"{self.request_bytes / gb:.4g} GB of KV, {self.wire_bytes / gb:.4g} GB on the wire over all "
            f"ranks{copies}; one rank moves {self.rank_bytes / gb:.4g} GB",
        ]
        if self.ranks > 1:
            lines.append(f"all {self.ranks} ranks move at once, as {self.ranks} initiators")
        elif tp > 1:
            lines.append(
                f"one rank of {tp} is measured: in an engine all of them move at once, each through NICs of "
                "its own or through shared ones (--all-ranks)"
            )
        return lines


def kv_work(
    model: str,
    input_len: int,
    tensor_parallel_size: int = 1,
    block_tokens: int = 16,
    *,
    all_ranks: bool = False,
) -> KvWork:
    """The work for a model of ``MODELS``. Raises InputError for what cannot be."""
    shape = MODELS.get(model.lower())
    if shape is None:
        raise InputError(f"no model is called {model!r}", hint=f"there are: {', '.join(MODEL_NAMES)}")
    given = {"--input-len": input_len, "--tp": tensor_parallel_size, "--block-tokens": block_tokens}
    for name, value in given.items():
        if value < 1:
            raise InputError(f"{name} must be at least 1, not {value}")
    heads, tp = shape.kv_heads, tensor_parallel_size
    if not shape.mla_dim and max(heads, tp) % min(heads, tp):
        raise InputError(
            f"{shape.name} has {heads} KV heads, which {tp} ranks cannot share evenly",
            hint=f"--tp has to divide {heads} or be a multiple of it",
        )
    return KvWork(shape, input_len, tp, block_tokens, tp if all_ranks else 1)


def check_memory(work: KvWork, free_bytes: int, *, scattered: bool = False) -> None:
    """Raises InputError, with the largest input length that fits, if buffers do not fit ``free_bytes``."""
    spread = 2 if scattered else 1
    usable = MEMORY_SHARE * free_bytes
    need = work.memory_bytes * spread
    if need <= usable:
        return
    per_block = 2 * spread * work.ranks * work.regions * work.block_bytes
    longest = int(usable // per_block) * work.block_tokens
    fits = f"the largest --input-len that fits is {longest}" if longest else "not even one block fits"
    more = "" if work.ranks == 1 else "; one rank alone needs less (leave --all-ranks out)"
    raise InputError(
        f"the KV cache of {work.shape()} needs {need / 1e9:.3g} GB of buffers, and {usable / 1e9:.3g} GB "
        f"of {free_bytes / 1e9:.3g} GB free memory may be used",
        hint=fits + more,
    )
