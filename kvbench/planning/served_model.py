"""Which model a server that is already there serves."""

from __future__ import annotations

from kvbench.core.access import ServerAccess
from kvbench.core.foreign_text import visible
from kvbench.errors import InputError, ServerError
from kvbench.hosts.server_access import access_headers, hidden, variables

ASK_TIMEOUT_S = 10.0
MOST_NAMED = 12
"""Models that a message lists."""


def served_model(root: str, access: ServerAccess, wanted: str = "") -> str:
    """The model that a server offers; of several the ``wanted`` one.

    Raises ServerError if it cannot be asked, InputError if it serves several and none, or another, was named.
    """
    found = served_models(root, access)
    names = ", ".join(found[:MOST_NAMED]) + (", …" if len(found) > MOST_NAMED else "")
    if wanted and wanted not in found:
        raise InputError(f"{root} serves no model {wanted!r}", hint=f"it serves: {names}")
    if not wanted and len(found) > 1:
        raise InputError(
            f"{root} serves {len(found)} models, so one must be named: {names}",
            hint=f"add --model {found[0]}",
        )
    return wanted or found[0]


def served_models(root: str, access: ServerAccess) -> list[str]:
    """The models of ``/v1/models``, in its order. Raises ServerError with a hint by cause."""
    import httpx  # a tenth of a second, which `kvbench plan` of a scenario need not wait for

    from kvbench.hosts import web
    from kvbench.hosts.server_hints import failure_hint, status_hint, status_text

    url = f"{root}/v1/models"
    headers = access_headers(access)
    try:
        with web.client(headers=headers, timeout_s=ASK_TIMEOUT_S, access=access) as client:
            response = client.get(url)
    except httpx.HTTPError as error:
        raise ServerError(
            f"GET {url} failed: {type(error).__name__} {error}".rstrip(), hint=failure_hint(url, error)
        ) from error
    if response.status_code != 200:
        said = hidden(visible(response.text[:200].strip()), variables(access))
        raise ServerError(
            f"GET {url} answered {status_text(response.status_code)}" + (f": {said}" if said else ""),
            hint=status_hint(response.status_code, "authorization" in {name.lower() for name in headers}),
        )
    try:
        found = [visible(str(each["id"])) for each in web.json_of(response)["data"]]
    except (ValueError, LookupError, TypeError) as error:
        raise ServerError(
            f"GET {url} answered no list of models",
            hint="it is no OpenAI-compatible server, or its API is below another path: the base URL ends "
            "where /v1 begins",
        ) from error
    if not found:
        raise ServerError(f"GET {url} answered an empty list of models", hint="has it loaded one?")
    return found
