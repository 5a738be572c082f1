"""Why a server could not be asked, by cause: what a status, or a failed connection, most likely means."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterator
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

import httpx

from kvbench.core.plan.processes import PROXIES

_OF_STATUS: Final = {
    401: "it wants an API key: name the environment variable that holds it with --api-key-env NAME",
    403: "the key that was sent may not do this: look at the key's rights and at --api-key-env",
    404: "nothing is at that path: the base URL ends where /v1 begins, as http://host:8000; servers that "
    "know chats alone are asked with --endpoint chat",
    405: "the path takes no such request: is the base URL that of the OpenAI API?",
    413: "the prompt is too large for it: a smaller --input-len, or a greater limit of the proxy before it",
    422: "it does not know one of the request's fields: is it OpenAI-compatible?",
    429: "it limits how many requests it takes: raise that limit, or ask behind its gateway",
}
_SERVER_FAILED: Final = "it failed by itself, or the proxy before it has no server: look into its log"
_NOT_HTTP: Final = "what listens there does not speak HTTP: is the port right?"


def status_hint(status: int, sent_key: bool = False) -> str:
    """What an answer with this status most likely means; empty where there is nothing to say."""
    if status == 401 and sent_key:
        return "the server refuses the key that was sent: is it the right one, without a line end?"
    if 300 <= status < 400:
        return "give the URL that it leads to: redirects are not followed"
    return _OF_STATUS.get(status, _SERVER_FAILED if status >= 500 else "")


def status_text(status: int) -> str:
    """``401 Unauthorized``; the number alone where the standard has no word for it."""
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


def failure_hint(url: str, error: Exception) -> str:
    """What a request that got no answer most likely means."""
    text = " ".join(str(each) for each in _causes(error))
    parts = urlsplit(url)
    if "CERTIFICATE_VERIFY_FAILED" in text or any(
        isinstance(each, ssl.SSLCertVerificationError) for each in _causes(error)
    ):
        return (
            "its certificate is not believed here: name its authority's file with --ca-file FILE, or believe "
            "any with --insecure"
        )
    if re.search(r"WRONG_VERSION_NUMBER|HTTP_REQUEST|RECORD_LAYER_FAILURE", text):
        return f"it does not speak TLS there: try http://{parts.netloc}"
    if "SSL" in text or "TLS" in text:
        return "TLS failed before the request was sent: versions, or a certificate that it wants of us"
    if isinstance(error, httpx.TimeoutException):
        return "nothing answered in time: is it still loading its model, or does a firewall drop packets?"
    if isinstance(error, (httpx.RemoteProtocolError, httpx.ReadError)):
        tls = f" If it speaks TLS there: https://{parts.netloc}" if parts.scheme == "http" else ""
        return _NOT_HTTP + tls
    if re.search(r"Name or service not known|nodename|Temporary failure|No address", text):
        return f"the host {parts.hostname} is not known here: is it spelt right?{_past_the_proxy()}"
    if "refused" in text:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return f"nothing listens on port {port} there: is it up?{_past_the_proxy()}"
    return f"is the server running there, and can this machine reach it?{_past_the_proxy()}"


def _past_the_proxy() -> str:
    if not any(os.environ.get(cased) for name in PROXIES for cased in (name, name.upper())):
        return ""
    return (
        " kvbench goes straight to it, past the proxy that is set: what lies behind one is measured from its "
        "other side, or through a TCP tunnel such as ssh -L"
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__
