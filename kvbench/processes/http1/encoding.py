"""A client's request as bytes."""

from __future__ import annotations

from collections.abc import Mapping

from kvbench.errors import InputError


def request_bytes(
    method: str, path: str, host: str, headers: Mapping[str, str] | None = None, body: bytes = b""
) -> bytes:
    """A whole request. ``host`` is the Host header's value."""
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}"]
    for name, value in (headers or {}).items():
        lines.append(f"{name}: {value}")
    if body or method not in ("GET", "HEAD"):
        lines.append(f"content-length: {len(body)}")
    head = "\r\n".join(lines)
    breaks = len(lines) - 1
    if head.count("\r") != breaks or head.count("\n") != breaks:
        culprit = next((line for line in lines if "\r" in line or "\n" in line), "")
        raise InputError(f"header {culprit.partition(':')[0]!r} holds a line break")
    return head.encode("latin-1", "replace") + b"\r\n\r\n" + body
