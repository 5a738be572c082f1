"""Makes the CPU lab's model: a real Qwen3 of 0.8 million random weights, with a tokenizer of its own.

Run by the lab's Python, not kvbench's: ``.venv-vllm/bin/python tools/make_tiny_model.py FOLDER``. Nothing is
downloaded: the tokenizer is a byte-level BPE trained on Python's own library, the weights are drawn from
a fixed seed. About 13 s on one core.

The weights' standard deviation, 0.08, is four times that of an untrained model: with the usual 0.02 the
greedy output hardly depends on the prompt, and comparing outputs would prove nothing. Tokens that are only a
part of a character have zero weights, so that greedy answers always have text.
"""

from __future__ import annotations

import argparse
import shutil
import sysconfig
from importlib import import_module
from pathlib import Path
from typing import Any

SEED = 20_240_229
VOCAB_SIZE = 4096
WEIGHT_STD = 0.08
MAX_POSITIONS = 8192
SPECIAL_TOKENS = ("<|endoftext|>", "<|pad|>")
MAX_SOURCES = 400
"""Files of Python's library that the tokenizer learns from: enough for 4096 tokens."""

CONFIG = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
"""KV per token: 2 (K and V) × 2 layers × 2 heads × 32 × 4 bytes = 1 KiB."""


def sources() -> list[str]:
    """Files of Python's own library, always the same ones for one Python version."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return [str(path) for path in sorted(library.glob("*.py")) + sorted(library.glob("[a-e]*/*.py"))][
        :MAX_SOURCES
    ]


def make_tokenizer(folder: Path) -> list[int]:
    """A byte-level BPE: every sequence of ids is a prompt, and any text has ids. Returns the tokens without a
    text of their own: special ones, and parts of characters."""
    tokenizers, transformers = import_module("tokenizers"), import_module("transformers")
    tokenizer: Any = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train(
        sources(), vocab_size=VOCAB_SIZE, special_tokens=list(SPECIAL_TOKENS), show_progress=False
    )
    end, pad = SPECIAL_TOKENS
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer,
        bos_token=end,
        eos_token=end,
        pad_token=pad,
        model_max_length=MAX_POSITIONS,
    )
    fast.save_pretrained(folder)
    texts = [fast.decode([token], skip_special_tokens=True) for token in range(VOCAB_SIZE)]
    return [token for token, text in enumerate(texts) if not text or "\ufffd" in text]


def make_weights(folder: Path, without_text: list[int]) -> int:
    torch, transformers = import_module("torch"), import_module("transformers")
    torch.manual_seed(SEED)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**CONFIG)).float()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * WEIGHT_STD)
        model.get_input_embeddings().weight[without_text] = 0.0  # tied: their logits are 0, never the highest
    model.save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the CPU lab's tiny random model.")
    parser.add_argument("folder", type=Path, help="where to; what is there is replaced")
    folder = parser.parse_args().folder.resolve()
    # Made beside its place and renamed, so that a folder of this name is always a whole model.
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    count = make_weights(unfinished, make_tokenizer(unfinished))
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    print(f"{folder}: {count} weights, {VOCAB_SIZE} tokens")


if __name__ == "__main__":
    main()
