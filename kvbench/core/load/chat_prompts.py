"""Prompts for servers that take chats alone: messages of common words instead of token ids.

Nobody but the server knows its tokenizer, and its chat template adds tokens of its own. Both are learned
from what it counts itself: ``usage.prompt_tokens`` of two messages of different length (``ChatLength.of``).
The words are so common that byte-pair tokenizers have each of them, with the space before it, as one token;
where one has not, the measured slope takes it in on average, and lengths differ a little from prompt to
prompt (``core/gates/answers.py`` allows for it).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvbench.errors import InputError

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
    """How many prompt tokens a message of so many words comes to: ``overhead + per_word · words``."""

    overhead_tokens: float = 0.0
    tokens_per_word: float = 1.0

    @classmethod
    def of(cls, words: tuple[int, int], tokens: tuple[int, int]) -> ChatLength:
        """From the tokens that a server has counted of two messages, the shorter one first."""
        per_word = (tokens[1] - tokens[0]) / (words[1] - words[0])
        return cls(tokens[0] - per_word * words[0], per_word)

    def words(self, input_len: int) -> int:
        """Words of a prompt of ``input_len`` tokens. Raises InputError where the template alone is longer."""
        count = round((input_len - self.overhead_tokens) / self.tokens_per_word)
        if count < 1:
            raise InputError(
                f"an input length of {input_len} tokens leaves no room for a chat: the server's template "
                f"alone takes {self.overhead_tokens:.0f}",
                hint="ask for longer inputs, or for /v1/completions",
            )
        return count


def messages(words: Iterable[int]) -> list[dict[str, str]]:
    """One user's message of these words, by their number in ``WORDS`` (modulo its length)."""
    text = " ".join(WORDS[number % len(WORDS)] for number in words)
    return [{"role": "user", "content": text}]


def messages_json(words: Iterable[int]) -> bytes:
    """The same as the bytes of its JSON."""
    return json.dumps(messages(words), separators=(",", ":")).encode()
