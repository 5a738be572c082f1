"""Data that the dispatchers between P and D need: the router and the load generator. Pure."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

COMPLETIONS: Final = "/v1/completions"
CHATS: Final = "/v1/chat/completions"
SESSION_HEADER: Final = "x-session-id"
"""HTTP header that names a request's session."""


@dataclass(frozen=True)
class BackendSpec:
    url: str
    bootstrap_url: str = ""
    side_address: str = ""
    engine_ids: list[str] = field(default_factory=list)
    """Engine ids of P's data-parallel ranks, if the connector needs and knows them."""
    side_addresses: list[str] = field(default_factory=list)
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    """Ranks whose engine ids a bootstrap server must list; before that they are still starting."""


def server_of_session(session: str, servers: int) -> int:
    """Return the index of the server that takes a session: a hash of its name, so every process agrees."""
    digest = hashlib.blake2b(session.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % servers


def prompt_key(path: str) -> str:
    """Return the name of the request field that holds the prompt."""
    return "messages" if path == CHATS else "prompt"


class AroundPrompt:
    """A request's fields with a placeholder for the prompt, and the JSON around it. The prompt is encoded
    once: 32k token ids are 200 kB of JSON."""

    def __init__(self, fields: Mapping[str, Any], key: str = "prompt") -> None:
        self._placeholder = f"prompt-{secrets.token_hex(16)}"
        self.fields: dict[str, Any] = {**fields, key: self._placeholder}

    def encode(self, fields: Mapping[str, Any]) -> tuple[bytes, bytes]:
        """Return the JSON of a connector's ``fields`` before and after the prompt."""
        text = json.dumps(fields, separators=(",", ":")).encode()
        before, _, after = text.partition(b'"%b"' % self._placeholder.encode())
        return before, after


RANK_HEADER: Final = "x-data-parallel-rank"
"""HTTP header that selects the data-parallel rank of a vLLM server."""


def engine_ids_in(body: bytes, least: int = 1) -> tuple[str, ...]:
    """Return a bootstrap response's engine ids by data-parallel rank; empty if one is missing."""
    try:
        ranks = json.loads(body)
        found = tuple(str(ranks[str(rank)]["engine_id"] or "") for rank in range(len(ranks)))
        return found if all(found) and len(found) >= least else ()
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return ()
