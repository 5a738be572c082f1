"""Hardware limits behind the gates: peak compute, work of a prompt, size of its KV.

Both err on the silent side: the peak is a GPU's highest dense one, and the work counts only what every
implementation computes. No kernel or data type allows a rate above it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal

# Dense tensor throughput (no structured sparsity) at the lowest precision that serves language models, in
# TFLOP/s (INT8: TOP/s), from the vendors' data sheets. Where variants differ and the name does not say which,
# the table has the fastest one. Longer names are matched first.
_PEAK_TFLOPS: Final = MappingProxyType(
    {
        "GB300": 15_000,  # FP4
        "B300": 15_000,  # FP4
        "GB200": 10_000,  # FP4
        "B200": 9_000,  # FP4
        "B100": 7_000,  # FP4
        "GH200": 1_979,  # FP8
        "H200": 1_979,
        "H100": 1_979,
        "H800": 1_979,
        "H100 PCIE": 1_513,
        "H100 NVL": 1_671,
        "H20": 296,
        "L40S": 733,
        "L40": 362,
        "L20": 239,
        "L4": 242,
        "A100": 624,  # INT8
        "A800": 624,
        "A40": 299,
        "A30": 330,
        "A10": 250,
        "A10G": 140,
        "T4": 130,
        "V100": 130,  # FP16
        "RTX 5090": 1_676,  # FP4
        "RTX 4090": 661,  # FP8
        "RTX 3090": 284,  # INT8
        "RTX PRO 6000": 2_000,  # FP4
        "RTX 6000 ADA": 728,
        "MI355X": 10_100,  # FP4
        "MI350X": 9_200,
        "MI325X": 2_615,  # FP8
        "MI300X": 2_615,
        "MI308X": 2_615,
        "MI250X": 383,  # INT8 and BF16
        "GAUDI3": 1_835,  # FP8
        "GAUDI2": 865,
    }
)
GPU_NAMES: Final = tuple(_PEAK_TFLOPS)


@dataclass(frozen=True)
class PrefillWork:
    """Work of a prompt: 2 FLOP per parameter and token, and attention, which grows with the square.
    ``parameters``: those that a prefill token uses, so only active experts, without embeddings and output
    layer. ``attention``: layers × query heads × mean width of key and value heads."""

    parameters: float
    attention: float = 0.0
    source: str = ""

    def flop(self, tokens: float) -> float:
        """Return the FLOP of one prompt; causal attention counts half of the square."""
        return 2.0 * self.parameters * tokens + 2.0 * self.attention * tokens * tokens


# Parameters: the models' cards and config.json files; embeddings are vocabulary × hidden size, twice if not
# tied. Of gpt-oss half of the layers see a window only, so half of the attention counts.
_WORK: Final = MappingProxyType(
    {
        "qwen2.5-7b": PrefillWork(6.53e9, 28 * 28 * 128, "model card: non-embedding parameters"),
        "llama-3.1-8b": PrefillWork(6.98e9, 32 * 32 * 128, "8.03e9 - 2 x 128256 x 4096"),
        "llama-3.1-70b": PrefillWork(68.4e9, 80 * 64 * 128, "70.55e9 - 2 x 128256 x 8192"),
        "qwen3-8b": PrefillWork(6.95e9, 36 * 32 * 128, "model card: non-embedding parameters"),
        "qwen3-32b": PrefillWork(31.2e9, 64 * 64 * 128, "model card: non-embedding parameters"),
        "qwen3-30b-a3b": PrefillWork(2.7e9, 48 * 32 * 128, "3.3e9 active - 2 x 151936 x 2048"),
        "qwen3-235b-a22b": PrefillWork(20.7e9, 94 * 64 * 128, "22e9 active - 2 x 151936 x 4096"),
        "gpt-oss-120b": PrefillWork(4.5e9, 18 * 64 * 64, "5.1e9 active - output layer"),
        "deepseek-v3": PrefillWork(35e9, 61 * 128 * 160, "37e9 active - 2 x 129280 x 7168"),
    }
)


def prefill_work(model: str, active_parameters: float | None = None) -> PrefillWork | None:
    known = _WORK.get(model)
    if active_parameters is None:
        return known
    return PrefillWork(active_parameters, known.attention if known else 0.0, "from the scenario")


def peak_flops(name: str) -> float | None:
    """Return the peak FLOP/s of one GPU by nvidia-smi's name or a short one ("h200")."""
    known = _known_gpu(name)
    return _PEAK_TFLOPS[known] * 1e12 if known else None


def _known_gpu(name: str) -> str:
    text = re.sub(r"[^A-Z0-9]+", " ", name.upper()).strip()
    for known in sorted(_PEAK_TFLOPS, key=len, reverse=True):
        if all(re.search(rf"(^| ){word}( |$)", text) for word in known.split()):
            return known
    return ""


# The same in 16 bits (BF16 or FP16 with wide sums), dense, in TFLOP/s, from the same data sheets; GPUs whose
# sheet names it. 8-bit key/value caches do not change what the products of the weights are computed in.
_PEAK_16BIT_TFLOPS: Final = MappingProxyType(
    {
        "GB200": 2_500,
        "B200": 2_250,
        "GH200": 990,
        "H200": 990,
        "H100": 990,
        "H800": 990,
        "H100 PCIE": 757,
        "H20": 148,
        "L40S": 363,
        "L40": 182,
        "L4": 121,
        "A100": 312,
        "A800": 312,
        "A40": 150,
        "A30": 165,
        "A10": 125,
        "A10G": 70,
        "T4": 65,
        "V100": 130,
        "MI325X": 1_308,
        "MI300X": 1_308,
        "MI250X": 383,
    }
)


def peak_flops_16bit(name: str) -> float | None:
    known = _known_gpu(name)
    return None if known not in _PEAK_16BIT_TFLOPS else _PEAK_16BIT_TFLOPS[known] * 1e12


@dataclass(frozen=True)
class Hardware:
    gpu: str
    count: int = 1

    @property
    def peak_flops(self) -> float | None:
        """FLOP/s of all its GPUs."""
        peak = peak_flops(self.gpu)
        return None if peak is None else peak * self.count

    def text(self) -> str:
        return f"{self.count} × {self.gpu}"


_HARDWARE: Final = re.compile(r"\s*(?:(\d{1,4})\s*[x×*]\s*)?(\S.*?)\s*")


def hardware_of(text: str) -> Hardware:
    """Return the GPUs of a text such as ``8xH200`` or ``L40S``. Raises ValueError for an unknown GPU."""
    found = _HARDWARE.fullmatch(text)
    if found is None or peak_flops(found[2]) is None or int(found[1] or 1) < 1:
        raise ValueError(f"{text!r} is not a known GPU; expected for example 8xH200: {', '.join(GPU_NAMES)}")
    return Hardware(found[2], int(found[1] or 1))


# GPUs that the emulated engine's timing profiles model; "quick" models none.
_PROFILES: Final = MappingProxyType({"h200-tp8-qwen3-30b-a3b": ("H200", 8), "a10-qwen2.5-7b": ("A10", 0)})


def profile_hardware(timing: str, tensor_parallel_size: int) -> Hardware | None:
    """Return the GPUs that a timing profile of the emulated engine models."""
    if timing not in _PROFILES:
        return None
    gpu, count = _PROFILES[timing]
    return Hardware(gpu, count or tensor_parallel_size)


KvDtype = Literal["fp8", "bf16", "fp16", "fp32"]

DTYPE_BYTES: Final = MappingProxyType({"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4})


@dataclass(frozen=True)
class ModelShape:
    """Model shape for the KV cache and the compute model.

    KV bytes per token are ``2 · layers · kv_heads · head_dim · dtype_bytes`` with grouped-query attention and
    ``layers · mla_dim · dtype_bytes`` with multi-head latent attention (MLA). MLA's vector, and each head if
    there are more tensor-parallel ranks than KV heads, is stored on several ranks, so more bytes are
    transferred than the logical ones."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    kv_dtype: KvDtype = "bf16"
    mla_dim: int = 0
    vocab_size: int = 32_000
    source: str = ""
    sliding_layers: int = 0
    """Layers whose attention sees the last ``sliding_window`` tokens only; older KV does not move."""
    sliding_window: int = 0

    @property
    def known(self) -> bool:
        return self.layers > 0

    @property
    def kv_parts(self) -> int:
        """Tensors per layer: keys and values, or one latent vector (MLA)."""
        return 1 if self.mla_dim else 2

    @property
    def whole(self) -> ModelShape:
        """The shape as an engine sees it that keeps all tokens in all layers."""
        return replace(self, sliding_layers=0, sliding_window=0)

    @property
    def full_layers(self) -> int:
        return self.layers - self.sliding_layers

    def kv_bytes_per_token(self) -> int:
        """Logical KV bytes of one token beyond the sliding windows: each head once."""
        return self.full_layers * self._layer_bytes

    @property
    def _layer_bytes(self) -> int:
        width = self.mla_dim if self.mla_dim else self.kv_heads * self.head_dim
        return self.kv_parts * width * DTYPE_BYTES[self.kv_dtype]

    def kv_bytes(self, tokens: int) -> int:
        """Return the logical KV bytes of a request."""
        in_windows = self.sliding_layers * min(tokens, self.sliding_window)
        return (self.full_layers * tokens + in_windows) * self._layer_bytes

    def window_blocks(self, tokens: int, block_tokens: int) -> int:
        """Return the blocks of a sliding layer that move; vLLM's connectors add one for the window's edge."""
        return min(self.blocks(tokens, block_tokens), -(-self.sliding_window // block_tokens) + 1)

    def wire_bytes(self, tokens: int, block_tokens: int, tensor_parallel_size: int = 1) -> int:
        """Return the KV bytes of a request's blocks over all tensor-parallel ranks."""
        blocks = self.full_layers * self.blocks(tokens, block_tokens)
        blocks += self.sliding_layers * self.window_blocks(tokens, block_tokens)
        return blocks * block_tokens * self._layer_bytes * self.wire_factor(tensor_parallel_size)

    def wire_factor(self, tensor_parallel_size: int) -> int:
        """Return how often each logical byte is stored, and so transferred, over all ranks."""
        if tensor_parallel_size < 1:
            raise ValueError("tensor_parallel_size must be at least 1")
        if self.mla_dim:
            return tensor_parallel_size
        return max(1, tensor_parallel_size // self.kv_heads)

    def wire_bytes_per_token(self, tensor_parallel_size: int = 1) -> int:
        """Return the KV bytes of one token beyond the windows over all tensor-parallel ranks."""
        return self.kv_bytes_per_token() * self.wire_factor(tensor_parallel_size)

    def blocks(self, tokens: int, block_tokens: int) -> int:
        """Return the KV blocks of ``tokens`` tokens; the last one moves whole."""
        return -(-tokens // block_tokens)

    def regions(self) -> int:
        """Separate KV tensors of an instance: one per layer and per key/value. vLLM keeps a sliding layer's
        blocks in the tensor of a full one."""
        return self.kv_parts * self.full_layers

    def block_bytes(self, block_tokens: int, tensor_parallel_size: int = 1) -> int:
        """Return the bytes of one block in one region, over all ranks."""
        return self.wire_bytes_per_token(tensor_parallel_size) * block_tokens // self.regions()


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
    ModelShape(
        "gpt-oss-120b",
        36,
        8,
        64,
        vocab_size=201_088,
        source="gpt-oss-120b config.json",
        sliding_layers=18,
        sliding_window=128,
    ),
    ModelShape("deepseek-v3", 61, 0, 0, "bf16", mla_dim=576, vocab_size=129_280, source="DeepSeek-V3 report"),
)

MODELS: Final = MappingProxyType({shape.name: shape for shape in _SHAPES})
