"""Text and tokens: reversible for what the engine writes, deterministic for everything else.

Token 1234 reads `` t1234``. Such words become that token again; any other word becomes one token by
its CRC-32, with the space before it.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from typing import Final

_WORDS: Final = re.compile(r"\s*\S+|\s+$")
_TOKEN: Final = re.compile(r" ?t(\d{1,9})")


def encode(text: str, vocab_size: int) -> list[int]:
    """Token ids of a text, in 1 … vocab_size − 1; an empty text has none."""
    return [_word_token(word, vocab_size) for word in _WORDS.findall(text)]


def _word_token(word: str, vocab_size: int) -> int:
    own = _TOKEN.fullmatch(word)
    if own is not None and 0 < int(own[1]) < vocab_size:
        return int(own[1])
    return 1 + zlib.crc32(word.encode("utf-8", "surrogatepass")) % (vocab_size - 1)


def decode(tokens: Iterable[int]) -> str:
    """The text of tokens; the end-of-sequence token (0) has none."""
    return "".join(f" t{token}" for token in tokens if token)
