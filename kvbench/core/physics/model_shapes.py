"""Model shapes, and what they say about the KV cache: bytes per token, blocks, descriptors.

The KV cache of grouped-query attention holds, per token, a key and a value vector for each
layer and KV head: ``2 · layers · kv_heads · head_dim · dtype_bytes`` bytes. Multi-head latent
attention (MLA) holds one compressed vector per layer instead: ``layers · mla_dim · dtype_bytes``.
With more tensor-parallel ranks than KV heads each head is stored more than once, and MLA's
vector is stored on every rank, so the bytes on the wire exceed the logical ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

KvDtype = Literal["fp8", "bf16", "fp16", "fp32"]

DTYPE_BYTES: Final = MappingProxyType({"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4})


@dataclass(frozen=True)
class ModelShape:
    """What the KV cache and the compute model need to know of a model."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    kv_dtype: KvDtype = "bf16"
    mla_dim: int = 0
    vocab_size: int = 32_000
    source: str = ""

    @property
    def known(self) -> bool:
        """False for a model of which only the name is known, behind somebody else's server."""
        return self.layers > 0

    @property
    def kv_parts(self) -> int:
        """Tensors per layer: keys and values apart, or one latent vector (MLA)."""
        return 1 if self.mla_dim else 2

    def kv_bytes_per_token(self) -> int:
        """Logical KV bytes of one token: each head once, whatever the tensor parallelism."""
        width = self.mla_dim if self.mla_dim else self.kv_heads * self.head_dim
        return self.kv_parts * self.layers * width * DTYPE_BYTES[self.kv_dtype]

    def wire_factor(self, tensor_parallel_size: int) -> int:
        """How many times each logical byte is stored, and so transferred, over all ranks."""
        if tensor_parallel_size < 1:
            raise ValueError("tensor_parallel_size must be at least 1")
        if self.mla_dim:
            return tensor_parallel_size
        return max(1, tensor_parallel_size // self.kv_heads)

    def wire_bytes_per_token(self, tensor_parallel_size: int = 1) -> int:
        """KV bytes of one token summed over all tensor-parallel ranks."""
        return self.kv_bytes_per_token() * self.wire_factor(tensor_parallel_size)

    def blocks(self, tokens: int, block_tokens: int) -> int:
        """KV blocks that hold ``tokens`` tokens; the last one moves whole."""
        return -(-tokens // block_tokens)

    def regions(self) -> int:
        """Separate KV tensors of an instance: one per layer and per key/value."""
        return self.kv_parts * self.layers

    def block_bytes(self, block_tokens: int, tensor_parallel_size: int = 1) -> int:
        """Bytes of one block in one region, summed over the ranks."""
        return self.wire_bytes_per_token(tensor_parallel_size) * block_tokens // self.regions()

    def descriptors(self, tokens: int, block_tokens: int) -> int:
        """Transfer descriptors of one rank if contiguous blocks are not merged."""
        return self.regions() * self.blocks(tokens, block_tokens)


# Dimensions: the models' published config.json files; DeepSeek's 512 + 64 latent width is
# the one its paper gives. `tiny` is ours: small enough for two cores and loopback TCP.
_SHAPES: Final = (
    ModelShape("tiny", 4, 2, 64, "bf16", vocab_size=8_192, source="kvbench's own, 2 KiB per token"),
    ModelShape("qwen2.5-7b", 28, 4, 128, "bf16", vocab_size=152_064, source="Qwen2.5-7B config.json"),
    ModelShape("llama-3.1-8b", 32, 8, 128, "bf16", vocab_size=128_256, source="Llama-3.1 config.json"),
    ModelShape("llama-3.1-70b", 80, 8, 128, "bf16", vocab_size=128_256, source="Llama-3.1 config.json"),
    ModelShape("qwen3-8b", 36, 8, 128, "bf16", vocab_size=151_936, source="Qwen3-8B config.json"),
    ModelShape("qwen3-32b", 64, 8, 128, "bf16", vocab_size=151_936, source="Qwen3-32B config.json"),
    ModelShape("qwen3-30b-a3b", 48, 4, 128, "fp8", vocab_size=151_936, source="Qwen3-30B-A3B config.json"),
    ModelShape("qwen3-235b-a22b", 94, 4, 128, "bf16", vocab_size=151_936, source="Qwen3-235B config.json"),
    ModelShape("gpt-oss-120b", 36, 8, 64, "bf16", vocab_size=201_088, source="gpt-oss-120b config.json"),
    ModelShape("deepseek-v3", 61, 0, 0, "bf16", mla_dim=576, vocab_size=129_280, source="DeepSeek-V3 report"),
)

MODELS: Final = MappingProxyType({shape.name: shape for shape in _SHAPES})
