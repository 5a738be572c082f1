"""The HTTP client of everything that kvbench asks over HTTP besides the load itself.

It goes where its URL says: it reads no proxy variables (``http_proxy``, ``https_proxy``, ``all_proxy``) and
no ``.netrc``. The load generator knows no proxies; a control client that took one would not reach servers on
loopback or on a data network, would hand prompts and API keys to somebody in between, and would take what a
proxy refuses for a gap in the evidence. ``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` count, since clusters have
certificate authorities of their own.

No other module makes an httpx client or transport, or uses urllib.request (tests/repository/test_proxies.py).
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from functools import cache
from typing import Final

import httpx

TIMEOUT_S: Final = 5.0
"""A client's where nothing is said, for each step of a request; httpx's own."""


def client(
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    over: httpx.BaseTransport | None = None,
) -> httpx.Client:
    """A client for requests with these headers, one after the other. ``over``: another way than sockets."""
    return httpx.Client(
        headers=dict(headers or {}),
        timeout=timeout_s,
        transport=over,
        verify=verification(_chosen_authorities()),
        trust_env=False,
    )


def transport() -> httpx.HTTPTransport:
    """The sockets below such a client, for one that sends some of its requests another way."""
    return httpx.HTTPTransport(verify=verification(_chosen_authorities()), trust_env=False)


def _chosen_authorities() -> tuple[str, str]:
    return os.environ.get("SSL_CERT_FILE", ""), os.environ.get("SSL_CERT_DIR", "")


@cache
def verification(chosen: tuple[str, str]) -> ssl.SSLContext:
    """Whose certificates are believed: those of ``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` (``chosen``, empty
    where they are unset) where one is set, as in OpenSSL, else this machine's and those that httpx brings.
    """
    context = ssl.create_default_context()  # reads both variables
    if not any(chosen):
        import certifi

        context.load_verify_locations(cafile=certifi.where())
    return context
