"""A tokenizer whose tokens are the emulated engine's words, in the format of Hugging Face's ``tokenizers``.

The engine counts a token for each word, and writes token 1234 as `` t1234`` (processes/emulator/protocol.py).
A client with any other tokenizer believes in other lengths. Here ``t1234`` is token 1234; of any other text
each letter is a token, so that different texts stay different. Decoded tokens have a space between them, and
are as many words.
"""

from __future__ import annotations

from typing import Any, Final

END: Final = "<|end|>"
UNKNOWN: Final = "\N{REPLACEMENT CHARACTER}"
"""Of any character that is no ASCII; a word like others, so that decoding does not drop it."""
ROLES: Final = ("<|system|>", "<|user|>", "<|assistant|>")
_LETTERS: Final = tuple(chr(code) for code in range(33, 127))
_TEMPLATE: Final = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer_files(vocab_size: int, max_len: int | None = None) -> dict[str, dict[str, Any]]:
    """File name → content, for ``AutoTokenizer.from_pretrained`` of the folder that holds both.

    Ids from ``vocab_size`` on are of letters and roles, which the engine takes as text only. ``max_len``: the
    most tokens of a request.
    """
    words = [END, *(f"t{number}" for number in range(1, vocab_size))]
    vocab = {word: number for number, word in enumerate((*words, *ROLES, UNKNOWN, *_LETTERS))}
    added = [
        {"id": vocab[word], "content": word, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for word in (END, *ROLES)
    ]
    split = {
        "type": "Split",
        "pattern": {"Regex": r"^t[1-9][0-9]*$|."},
        "behavior": "Isolated",
        "invert": False,
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, split]},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": UNKNOWN},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "additional_special_tokens": list(ROLES),
        "clean_up_tokenization_spaces": False,
        "chat_template": _TEMPLATE,
        **({} if max_len is None else {"model_max_length": max_len}),
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}
