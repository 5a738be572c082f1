"""What whoever dispatches requests between P and D needs, the router and the load generator alike. Pure."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

COMPLETIONS: Final = "/v1/completions"
CHATS: Final = "/v1/chat/completions"
SESSION_HEADER: Final = "x-session-id"
"""Names the session that a request belongs to."""


@dataclass(frozen=True)
class BackendSpec:
    """One server behind a dispatcher."""

    url: str
    bootstrap_url: str = ""
    side_address: str = ""
    engine_id: str = ""
    """P's, if it is known beforehand and the connector needs it."""
    tensor_parallel_size: int = 1


def server_of_session(session: str, servers: int) -> int:
    """Return the index of the server that takes a session, by a hash of its name.

    Every process and role computes it alone, so no table can fill up or differ.
    """
    digest = hashlib.blake2b(session.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % servers


def prompt_key(path: str) -> str:
    """The field of a request's body that the prompt stands in."""
    return "messages" if path == CHATS else "prompt"


class AroundPrompt:
    """A request's fields with a placeholder for the prompt, and their JSON around it.

    A prompt of 32k token ids is 200 kB of JSON; it is encoded once and then only put in its place.
    """

    def __init__(self, fields: Mapping[str, Any], key: str = "prompt") -> None:
        self._placeholder = f"prompt-{secrets.token_hex(16)}"
        self.fields: dict[str, Any] = {**fields, key: self._placeholder}

    def encode(self, fields: Mapping[str, Any]) -> tuple[bytes, bytes]:
        """JSON of what a connector made of ``fields``: what comes before the prompt, and after it."""
        text = json.dumps(fields, separators=(",", ":")).encode()
        before, _, after = text.partition(b'"%b"' % self._placeholder.encode())
        return before, after


def engine_id_in(body: bytes) -> str:
    """The engine id of the first data-parallel rank in a bootstrap answer; empty if there is none."""
    try:
        ranks = json.loads(body)
        first = min(ranks, key=int)
        return str(ranks[first].get("engine_id") or "")
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return ""
