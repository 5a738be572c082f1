"""How somebody else's server is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ServerAccess:
    """What requests to a server carry, and whose certificate is believed. No secret stands in it."""

    api_key_env: str = ""
    """The environment variable with the API key that it wants; empty: none."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Further headers; ``${NAME}`` in a value is that environment variable's, put in when it is sent."""
    ca_file: str = ""
    """Certificates (PEM) that are believed instead of the machine's; empty: the machine's."""
    insecure: bool = False
    """Any certificate is believed."""
