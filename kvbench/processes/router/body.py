"""A client's request body, decoded without its long prompt. Pure.

A prompt of 32k token ids is 200 kB of JSON, and decoding and encoding it anew for P and for D would
cost some 10 ms of TTFT. So the list is cut out as bytes before decoding and put back after encoding.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any, Final

from kvbench.errors import InputError

_PROMPT_LIST: Final = re.compile(rb'"prompt"\s*:\s*\[')
"""Cannot match inside a JSON string: there a quote is always preceded by a backslash."""
_DECODE: Final = json.JSONDecoder().decode
_ENCODE: Final = json.JSONEncoder(separators=(",", ":")).encode
_NO_NUMBERS: Final = (b'"', b"[", b"{", b"\\")
"""What a list of numbers does not hold; four plain searches are much faster than one pattern."""


_PLACEHOLDER: Final = f"prompt-{secrets.token_hex(16)}"
"""Stands for the list while a body is changed. It never leaves this process, so nobody can send it."""
_PLACEHOLDER_JSON: Final = f'"{_PLACEHOLDER}"'.encode()


class ClientBody:
    """``fields`` is the decoded body, to be left as it is; a prompt of token ids is a placeholder in it."""

    def __init__(self, raw: bytes) -> None:
        """Raises InputError if the body is no JSON object."""
        self._raw = raw
        self._prompt = b""
        match = _PROMPT_LIST.search(raw)
        if match is not None:
            start, end = match.end() - 1, raw.find(b"]", match.end()) + 1
            if end and all(raw.find(mark, start + 1, end) < 0 for mark in _NO_NUMBERS):
                self._prompt = raw[start:end]
                raw = b"%b%b%b" % (raw[:start], _PLACEHOLDER_JSON, raw[end:])
        try:
            fields = _DECODE(raw.decode())
        except (ValueError, RecursionError) as error:
            raise InputError(f"the request body is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise InputError("the request body must be a JSON object")
        self.fields: dict[str, Any] = fields

    def encode(self, fields: Mapping[str, Any]) -> bytes:
        """JSON of a body made from ``fields`` by a connector, with the prompt's bytes back in place."""
        if fields is self.fields:
            return self._raw  # nothing was changed
        data = _ENCODE(fields).encode()
        return data.replace(_PLACEHOLDER_JSON, self._prompt) if self._prompt else data
