"""How far bf16 lets greedy outputs differ when nothing but the batch size does: a model's own disagreement.

A model of random weights, as wide as small ones are, made here by a seed: nothing is downloaded. The same
prompts are decoded greedily one by one (the reference) and in batches of other sizes. Where a token differs,
the reference's margin between its first and second choice at that place says whether noise could do it.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Final

from tools.gpu.result import CheckFailedError, Figures, SkippedError

LAYERS: Final = 8
WIDTH: Final = 1024
HEADS: Final = 16
VOCAB: Final = 8192
PROMPTS: Final = 32
PROMPT_TOKENS: Final = 64
NEW_TOKENS: Final = 32
BATCHES: Final = (1, 2, 4, 8, 16, 32)
SEED: Final = 1


def noise(device: str = "cuda", dtype: str = "bfloat16", sizes: dict[str, int] | None = None) -> Figures:
    """By batch size: share of outputs that differ from one by one, where they begin to, margins there (nats).

    Raises SkippedError without torch; CheckFailedError where one by one gives other outputs the second time.
    """
    if importlib.util.find_spec("torch") is None:
        raise SkippedError("torch is not installed")
    torch: Any = importlib.import_module("torch")
    if device == "cuda" and not torch.cuda.is_available():
        raise SkippedError(f"torch {torch.__version__} finds no usable GPU")
    torch.manual_seed(SEED)
    model = _model(torch, device, getattr(torch, dtype), sizes or {})
    prompts = torch.randint(0, VOCAB, (PROMPTS, PROMPT_TOKENS), device=device)
    with torch.inference_mode():
        reference, margins = _decoded(torch, model, prompts, 1)
        figures: dict[str, Any] = {
            "torch": str(torch.__version__),
            "dtype": dtype,
            "device": torch.cuda.get_device_name() if device == "cuda" else device,
            "margin_nats_median": round(float(margins.float().median()), 5),
        }
        for batch in BATCHES:
            figures[f"batch {batch}"] = _against(
                reference, margins, _decoded(torch, model, prompts, batch)[0]
            )
    if figures["batch 1"]["outputs_that_differ"]:
        raise CheckFailedError("the same prompts one by one give other outputs the second time", figures)
    return figures


def _against(reference: Any, margins: Any, tokens: Any) -> dict[str, Any]:
    differ = tokens != reference
    rows = differ.any(dim=1)
    if not bool(rows.any()):
        return {"outputs_that_differ": 0.0}
    firsts = differ.int().argmax(dim=1)[rows]
    there = margins[rows].gather(1, firsts[:, None]).float()
    return {
        "outputs_that_differ": round(float(rows.float().mean()), 4),
        "first_token": int(firsts.min()),
        "margin_nats_max": round(float(there.max()), 5),
        "margin_nats_median": round(float(there.median()), 5),
    }


def _model(torch: Any, device: str, dtype: Any, sizes: dict[str, int]) -> Any:
    """Embedding, transformer layers, logits; causal, without a KV cache: each step reads the whole prefix."""
    width = sizes.get("width", WIDTH)
    layer = torch.nn.TransformerEncoderLayer(
        width, HEADS, 4 * width, dropout=0.0, batch_first=True, norm_first=True
    )
    parts = {
        "embed": torch.nn.Embedding(VOCAB, width),
        "stack": torch.nn.TransformerEncoder(layer, sizes.get("layers", LAYERS), enable_nested_tensor=False),
        "head": torch.nn.Linear(width, VOCAB, bias=False),
    }
    for each in parts["stack"].parameters():  # the layers start as copies of one
        if each.dim() > 1:
            torch.nn.init.xavier_uniform_(each)
    return {name: part.to(device=device, dtype=dtype).eval() for name, part in parts.items()}


def _decoded(torch: Any, model: Any, prompts: Any, batch: int) -> tuple[Any, Any]:
    """Greedy tokens and the margin at each: (prompts, new tokens) both."""
    tokens, margins = [], []
    for rows in prompts.split(batch):
        known, gaps = rows, []
        for _ in range(NEW_TOKENS):
            mask = torch.nn.Transformer.generate_square_subsequent_mask(
                known.shape[1], device=known.device, dtype=next(model["stack"].parameters()).dtype
            )
            hidden = model["stack"](model["embed"](known), mask=mask, is_causal=True)
            scores = torch.log_softmax(model["head"](hidden[:, -1]).float(), dim=-1)
            best = scores.topk(2, dim=-1)
            gaps.append(best.values[:, 0] - best.values[:, 1])
            known = torch.cat([known, best.indices[:, :1]], dim=1)
        tokens.append(known[:, -NEW_TOKENS:])
        margins.append(torch.stack(gaps, dim=1))
    return torch.cat(tokens), torch.cat(margins)
