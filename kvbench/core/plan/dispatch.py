"""What whoever dispatches requests between P and D needs, the router and the load generator alike. Pure."""

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
"""Names the session that a request belongs to."""


@dataclass(frozen=True)
class BackendSpec:
    """One server behind a dispatcher."""

    url: str
    bootstrap_url: str = ""
    side_address: str = ""
    engine_ids: list[str] = field(default_factory=list)
    """Those of P's data-parallel ranks, if they are known beforehand and the connector needs them."""
    side_addresses: list[str] = field(default_factory=list)
    """Those of the ranks, where each has one."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    """Ranks whose engine ids a bootstrap server must name; earlier they are still starting."""


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


RANK_HEADER: Final = "x-data-parallel-rank"
"""Sends a request to one data-parallel rank of a vLLM server."""


def engine_ids_in(body: bytes, least: int = 1) -> tuple[str, ...]:
    """The engine ids in a bootstrap answer by data-parallel rank; none if one of ``least`` is missing."""
    try:
        ranks = json.loads(body)
        found = tuple(str(ranks[str(rank)]["engine_id"] or "") for rank in range(len(ranks)))
        return found if all(found) and len(found) >= least else ()
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return ()
