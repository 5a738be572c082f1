"""Access to external servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ServerAccess:
    """Headers and certificates for a server; contains no secret."""

    api_key_env: str = ""
    """Environment variable with the API key, or empty."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Further headers; ``${NAME}`` in a value is replaced by that environment variable when sent."""
    ca_file: str = ""
    """PEM file of trusted certificates; empty: the machine's."""
    insecure: bool = False
    """Skip TLS verification."""
