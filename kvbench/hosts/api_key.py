"""A server's API key: it stays in the environment, and only its variable's name is written anywhere.

Specs, plans and command lines carry the name; who sends a request looks the value up at that moment. Whatever
a server says back goes through ``hidden`` before it is kept, since some repeat the key that they refuse.
"""

from __future__ import annotations

import os
import re
from typing import Final

from kvbench.errors import InputError

WITHHELD: Final = "(API key)"
MIN_SHOWN: Final = 4
"""So many characters of a key are no secret yet."""
_SENDABLE: Final = re.compile(r"[\x21-\x7e]+")


def bearer(variable: str) -> dict[str, str]:
    """The header that carries the key of this environment variable; none for no variable.

    Raises InputError if it is unset, or holds what no header may; the message does not show the value.
    """
    if not variable:
        return {}
    key = os.environ.get(variable, "")
    if not key:
        raise InputError(
            f"the environment variable {variable}, which api_key_env names, is not set",
            hint=f"export {variable}=… in the shell that starts kvbench",
        )
    if not _SENDABLE.fullmatch(key):
        raise InputError(
            f"the API key in {variable} has a space, a line break or another character that a header may not",
            hint="look for a stray line end at its end",
        )
    return {"authorization": f"Bearer {key}"}


def carried(variable: str) -> dict[str, str]:
    """The variable with its key, for a process elsewhere that is to send it; empty where there is none.

    To be handed over a connection, into that process's environment and nowhere else.
    """
    key = os.environ.get(variable, "") if variable else ""
    return {variable: key} if key else {}


def hidden(text: str, variable: str) -> str:
    """The text without the key of this environment variable, nor the beginning of it where a text was cut."""
    key = os.environ.get(variable, "") if variable else ""
    if not key:
        return text
    text = text.replace(key, WITHHELD)
    end = text.removesuffix("…")
    for length in range(len(key) - 1, MIN_SHOWN - 1, -1):
        if end.endswith(key[:length]):
            return end[:-length] + WITHHELD
    return text
