"""The transfer of one request's KV cache by an engine: its descriptors and bytes.

An instance's cache is cut into blocks of ``block_tokens`` tokens, and each tensor-parallel rank keeps its own
heads and moves them itself. vLLM has arranged keys (K) and values (V) in three ways, and its connectors for
NIXL and Mooncake follow (read in vLLM 0.13, 0.19, 0.22 to 0.26, 0.28, 0.32 and 0.33; FlashAttention, equal TP
of P and D):

- ``apart`` (before 0.23): a region for K and one for V in each layer. Neighbouring blocks merge.
- ``halves`` (0.23 to 0.25): one region for each layer, in which each block holds K and then V. Both
  connectors list all K halves of a layer, then all V halves, so that no two of them are neighbours.
- ``whole`` (0.26 and newer): one region for each layer, each block in one piece. Neighbouring blocks merge.

MLA has one latent vector for each token and layer, so its blocks are whole in every version. Mooncake's
connector merges neighbouring blocks itself; vLLM leaves NIXL's merging on (it never passes
``skip_desc_merge``). A store gets one object for each block, with all its layers.

Layers with a sliding window: from 0.23 on vLLM leaves its hybrid KV cache manager on with these connectors
(read in 0.19, 0.21, 0.22, 0.23, 0.24 and 0.33). They then move the window's last blocks only, and a sliding
layer's blocks are in the tensor of a full one. Before, and in the emulated engine, layers keep all tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from kvbench.core.engine_versions import NEWEST_KNOWN, Release, dotted, release
from kvbench.core.physics import DTYPE_BYTES, MODELS, ModelShape
from kvbench.errors import InputError

MEMORY_SHARE: Final = 0.8
"""Share of the free memory for buffers; libraries need the rest."""

KvTensors = Literal["apart", "halves", "whole"]
"""How a connector sees K and V of a block: in two regions, as two halves of a block, or as one piece."""

HALVES_SINCE: Final[Release] = (0, 23)
WHOLE_SINCE: Final[Release] = (0, 26)
WINDOWS_SINCE: Final[Release] = (0, 23)

WHOLE_BLOCKS: Final = frozenset({"mooncake_store", "yuanrong", "omni"})
"""Stores in which one object holds a block of all layers."""

MODEL_NAMES: Final = tuple(MODELS)


def kv_tensors(version: Release = NEWEST_KNOWN) -> KvTensors:
    """Return how a vLLM release arranges K and V."""
    if version < HALVES_SINCE:
        return "apart"
    return "halves" if version < WHOLE_SINCE else "whole"


@dataclass(frozen=True)
class KvPieces:
    """The pieces of memory that hold one block of a model's KV cache at one rank."""

    regions: int
    """Separate tensors."""
    per_region: int
    """Pieces of a block in each region: 2 if K and V are halves of it."""
    merge: bool
    """Whether the pieces of neighbouring blocks are neighbours, so that a connector merges them."""

    @property
    def per_block(self) -> int:
        return self.regions * self.per_region


def kv_pieces(model: ModelShape, tensors: KvTensors) -> KvPieces:
    if model.kv_parts == 1:
        return KvPieces(model.full_layers, 1, merge=True)
    if tensors == "halves":
        return KvPieces(model.full_layers, 2, merge=False)
    return KvPieces(model.full_layers * (2 if tensors == "apart" else 1), 1, merge=True)


@dataclass(frozen=True)
class KvWork:
    """One request's KV cache at one tensor-parallel rank, or at all of them at once (``ranks`` of them)."""

    model: ModelShape
    input_len: int
    tensor_parallel_size: int
    block_tokens: int
    ranks: int = 1
    version: Release = NEWEST_KNOWN
    """vLLM release of the connector that builds the descriptors."""

    @property
    def block_pieces(self) -> KvPieces:
        return kv_pieces(self.model, kv_tensors(self.version))

    @property
    def regions(self) -> int:
        return self.block_pieces.regions

    @property
    def blocks(self) -> int:
        """Blocks of the request in each tensor; the last one moves whole."""
        blocks = self.model.blocks(self.input_len, self.block_tokens)
        if not self.model.sliding_layers:
            return blocks
        windows = -(-self.model.sliding_layers // self.model.full_layers)
        return blocks + windows * self.model.window_blocks(self.input_len, self.block_tokens)

    @property
    def region_pieces(self) -> int:
        return self.blocks * self.block_pieces.per_region

    @property
    def piece_bytes(self) -> int:
        heads = max(1, self.model.kv_heads // self.tensor_parallel_size)
        width = self.model.mla_dim or heads * self.model.head_dim
        token = self.model.kv_parts * self.model.full_layers * width * DTYPE_BYTES[self.model.kv_dtype]
        return self.block_tokens * token // self.block_pieces.per_block

    @property
    def pieces(self) -> int:
        """Pieces of one rank, before anything is merged."""
        return self.regions * self.region_pieces

    @property
    def descriptors(self) -> int:
        """Descriptors of one rank for blocks that were handed out in a row, after merging."""
        return self.regions if self.block_pieces.merge else self.pieces

    @property
    def rank_bytes(self) -> int:
        return self.pieces * self.piece_bytes

    @property
    def wire_bytes(self) -> int:
        """Bytes that all ranks of the instance move for this request."""
        return self.rank_bytes * self.tensor_parallel_size

    @property
    def request_bytes(self) -> int:
        """KV bytes of the request, each once: without copies on other ranks and the last block's rest."""
        return self.model.kv_bytes(self.input_len)

    @property
    def logical_bytes(self) -> int:
        """Logical bytes of one rank's transfer; part of ``request_bytes``."""
        return self.request_bytes // self.tensor_parallel_size

    def memory_bytes(self, *, scattered: bool = False) -> int:
        """Bytes of both sides' buffers, of all ranks that move at once."""
        moved = 2 * (2 if scattered else 1) * self.rank_bytes * self.ranks
        return moved + self.free_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of the pieces that stay free, one in each region of each buffer."""
        return (self.ranks + 1) * self.regions * self.piece_bytes

    def shape(self) -> str:
        which = f"{self.ranks} ranks" if self.ranks > 1 else "rank 1"
        vllm = f"vLLM {dotted(self.version[:2])}"
        return f"{self.model.name} {self.input_len} tokens, {which} of {self.tensor_parallel_size}, {vllm}"

    def words(self) -> list[str]:
        """Return the meaning of the numbers, one sentence each."""
        tp, gb = self.tensor_parallel_size, 1e9
        factor = self.model.wire_factor(tp)
        arranged = {
            "apart": "K and V separate in each layer",
            "halves": "one per layer; K and V are halves of each block",
            "whole": "one per layer; K and V in one piece",
        }[kv_tensors(self.version)]
        arranged = "one per layer, MLA" if self.model.mla_dim else arranged
        merged = "merged into" if self.block_pieces.merge else "not mergeable, so"
        copies = f", each KV head is on {factor} ranks" if factor > 1 and not self.model.mla_dim else ""
        copies = ", each rank keeps all of it" if factor > 1 and self.model.mla_dim else copies
        lines = [
            f"{self.model.name} ({self.model.kv_dtype}), {self.input_len} tokens, as vLLM "
            f"{dotted(self.version[:2])} moves it: {self.regions} regions ({arranged}) × "
            f"{self.region_pieces} pieces of {self.piece_bytes} bytes at each of {tp} ranks, {merged} "
            f"{self.descriptors} descriptors if the request's blocks are consecutive",
            f"{self.request_bytes / gb:.4g} GB of KV, {self.wire_bytes / gb:.4g} GB on the wire over all "
            f"ranks{copies}; one rank moves {self.rank_bytes / gb:.4g} GB",
        ]
        if self.ranks > 1:
            lines.append(f"all {self.ranks} ranks move at once, as {self.ranks} initiators")
        elif tp > 1:
            lines.append(
                f"one rank of {tp} is measured; in an engine all ranks move at once, through separate "
                "or shared NICs (--all-ranks)"
            )
        return lines


def kv_work(
    model: str,
    input_len: int,
    tensor_parallel_size: int = 1,
    block_tokens: int = 16,
    *,
    all_ranks: bool = False,
    version: str = "",
) -> KvWork:
    """Return the work for a model of ``MODELS`` as a vLLM version does it; by default the newest known one.
    Raises InputError for impossible shapes."""
    shape = MODELS.get(model.lower())
    if shape is None:
        raise InputError(f"unknown model {model!r}", hint=f"known: {', '.join(MODEL_NAMES)}")
    given = {"--input-len": input_len, "--tp": tensor_parallel_size, "--block-tokens": block_tokens}
    for name, value in given.items():
        if value < 1:
            raise InputError(f"{name} must be at least 1, not {value}")
    heads, tp = shape.kv_heads, tensor_parallel_size
    if not shape.mla_dim and max(heads, tp) % min(heads, tp):
        raise InputError(
            f"{shape.name} has {heads} KV heads, which cannot be divided evenly over {tp} ranks",
            hint=f"--tp has to divide {heads} or be a multiple of it",
        )
    vllm = release(version) if version else NEWEST_KNOWN
    shape = shape if vllm >= WINDOWS_SINCE else shape.whole
    return KvWork(shape, input_len, tp, block_tokens, tp if all_ranks else 1, vllm)


def check_memory(work: KvWork, free_bytes: int, *, scattered: bool = False) -> None:
    """Raise InputError, with the largest input length that fits, if buffers do not fit ``free_bytes``."""
    usable = MEMORY_SHARE * free_bytes
    need = work.memory_bytes(scattered=scattered)
    if need <= usable:
        return
    free = work.free_bytes
    per_block = (need - free) // work.blocks
    longest = int((usable - free) // per_block) * work.block_tokens
    fits = f"the largest --input-len that fits is {longest}" if longest > 0 else "not even one block fits"
    more = "" if work.ranks == 1 else "; one rank needs less (omit --all-ranks)"
    raise InputError(
        f"the KV cache of {work.shape()} needs {need / 1e9:.3g} GB of buffers, and {usable / 1e9:.3g} GB "
        f"of {free_bytes / 1e9:.3g} GB free memory may be used",
        hint=fits + more,
    )
