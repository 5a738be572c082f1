"""Prompts that miss every prefix cache: token ids of exact length, or messages for chat-only servers. Pure.

A trial's prompts differ in their first tokens, so no two share a first cache block; another seed gives other
prompts. Messages use common words; ``ChatLength`` learns tokenizer and template from two messages'
``usage.prompt_tokens``, and ``core/gates/answers.py`` tolerates the rest. ``tokenizer_files`` makes a
tokenizer for the emulated engine, so that other clients count the same lengths."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvbench.errors import InputError

_STREAM: Final = 2
"""Random stream, separate from arrivals."""
_LOW_IDS: Final = 256
"""Lowest regular ids: special tokens and single bytes are usually below 256."""


@dataclass(frozen=True)
class PromptShape:
    """Lengths in tokens. All prompts of a trial share the first ``shared_prefix_len`` tokens."""

    input_len: int
    vocab_size: int
    shared_prefix_len: int = 0


def lowest_id(vocab_size: int) -> int:
    """Return the lowest used token id: above special ones, at most a quarter of the vocabulary."""
    return min(_LOW_IDS, vocab_size // 4)


def token_prompts(num_prompts: int, shape: PromptShape, seed: int) -> NDArray[np.int32]:
    """Return token ids, shape (num_prompts, input_len), in [lowest_id(vocab_size), vocab_size). Raises
    InputError if prompts or vocabulary are too small for distinct prompts."""
    unique_len = shape.input_len - shape.shared_prefix_len
    if shape.shared_prefix_len < 0 or unique_len < 1:
        raise InputError(
            f"input_len {shape.input_len} must exceed shared_prefix_len {shape.shared_prefix_len}"
        )
    low = lowest_id(shape.vocab_size)
    choices = shape.vocab_size - low
    if choices < 1:
        raise InputError(f"vocab_size must be at least 1, it is {shape.vocab_size}")
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([_STREAM, seed])))
    shared = random.integers(low, shape.vocab_size, shape.shared_prefix_len)
    digits = _digits_needed(num_prompts, choices)
    if digits > unique_len:
        raise InputError(
            f"{num_prompts} prompts of {unique_len} tokens cannot all differ with only {choices} token ids",
            hint="use longer prompts or a larger vocab_size",
        )
    prompts = random.integers(low, shape.vocab_size, (num_prompts, shape.input_len), dtype=np.int32)
    prompts[:, : shape.shared_prefix_len] = shared
    # The leading tokens are the digits of numbers drawn without replacement: distinct by construction.
    numbers = random.choice(choices**digits, num_prompts, replace=False)
    for position in range(digits):
        prompts[:, shape.shared_prefix_len + position] = low + numbers % choices
        numbers //= choices
    return prompts


def _digits_needed(count: int, base: int) -> int:
    """Return the digits in this base for ``count`` distinct numbers; a large number if impossible."""
    digits, numbers = 1, base
    while numbers < count:
        if base == 1:
            return count
        digits += 1
        numbers *= base
    return digits


_COMMON: Final = """
able about above across act action add after again against age air all almost along already also always
among amount and animal answer any appear apply area arm army around art ask away baby back bad ball bank
base be bear beat beautiful because become bed been before began begin behind believe best better between
big bird bit black blood blue board boat body bone book born both bottom box boy branch bread break bright
bring brother brought build built burn bus business but buy by call came can cap capital captain car care
carry case cat catch cause cell center central century certain chair chance change charge check chief child
choose church circle city claim class clean clear climb clock close cloth cloud coast coat cold color come
common company complete condition consider contain control cook cool copy corn corner correct cost could
count country course cover cross crowd cry current cut dance danger dark day dead deal dear death decide
deep degree depend desert design develop did die differ direct discuss distance divide do doctor does dog
dollar done door double down draw dream dress drink drive drop dry during each ear early earth ease east eat
edge effect egg eight either electric else end enemy energy engine enough enter equal even evening event
ever every exact example except excite exercise expect experience eye face fact fair fall family famous far
farm fast fat father favor fear feed feel feet fell felt few field fight figure fill final find fine finger
finish fire first fish fit five flat floor flow flower fly follow food foot for force foreign forest form
forward found four free fresh friend from front fruit full fun game garden gas gave general gentle get girl
give glad glass go gold gone good got govern grand grass gray great green grew ground group grow guess guide
gun had hair half hand happen happy hard has hat have he head hear heart heat heavy held help her here high
hill him his history hit hold hole home hope horse hot hour house how huge human hundred
"""
WORDS: Final = tuple(_COMMON.split())


@dataclass(frozen=True)
class ChatLength:
    """Prompt tokens of a message: ``overhead + per_word · words``."""

    overhead_tokens: float = 0.0
    tokens_per_word: float = 1.0

    @classmethod
    def of(cls, words: tuple[int, int], tokens: tuple[int, int]) -> ChatLength:
        """Fit to the token counts of two messages, the shorter one first."""
        per_word = (tokens[1] - tokens[0]) / (words[1] - words[0])
        return cls(tokens[0] - per_word * words[0], per_word)

    def words(self, input_len: int) -> int:
        """Return a prompt of ``input_len`` tokens. Raises InputError if the template is longer."""
        count = round((input_len - self.overhead_tokens) / self.tokens_per_word)
        if count < 1:
            raise InputError(
                f"an input length of {input_len} tokens is too short for a chat: the server's template "
                f"alone takes {self.overhead_tokens:.0f}",
                hint="use longer inputs, or /v1/completions",
            )
        return count


def messages(words: Iterable[int]) -> list[dict[str, str]]:
    """Return one user message of words by their index in ``WORDS`` (modulo its length)."""
    text = " ".join(WORDS[number % len(WORDS)] for number in words)
    return [{"role": "user", "content": text}]


def messages_json(words: Iterable[int]) -> bytes:
    return json.dumps(messages(words), separators=(",", ":")).encode()


END: Final = "<|end|>"
UNKNOWN: Final = "\N{REPLACEMENT CHARACTER}"
"""Token of any non-ASCII character; a regular word, so that decoding keeps it."""
ROLES: Final = ("<|system|>", "<|user|>", "<|assistant|>")
_LETTERS: Final = tuple(chr(code) for code in range(33, 127))
_TEMPLATE: Final = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer_files(vocab_size: int, max_len: int | None = None) -> dict[str, dict[str, Any]]:
    """Return file name → content for ``AutoTokenizer.from_pretrained`` of their folder. Ids from
    ``vocab_size`` on are letters and roles, accepted as text only. ``max_len``: most tokens per request."""
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
