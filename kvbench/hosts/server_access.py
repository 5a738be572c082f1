"""Access to a server: secrets stay in the environment; only the names of their variables are written. Specs,
plans and command lines have the names; a sender reads the values when it sends. Responses of a server pass
``redact`` before they are stored, since some repeat the refused key."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvbench.core.access import ServerAccess
from kvbench.errors import InputError

if TYPE_CHECKING:  # only a sender needs it, and `kvbench plan` sends nothing
    import ssl

WITHHELD: Final = "(API key)"
MIN_SHOWN: Final = 4
"""Shorter parts of a key are not redacted."""
_SENDABLE: Final = re.compile(r"[\x21-\x7e]+")
_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def variables(access: ServerAccess) -> tuple[str, ...]:
    """Return the environment variables with this server's secrets."""
    key_env = (access.api_key_env,) if access.api_key_env else ()
    return tuple(dict.fromkeys((*key_env, *named_in(access.headers.values()))))


def named_in(values: Iterable[str]) -> list[str]:
    """Return the variables used as ``${NAME}`` in headers' values."""
    return [name for value in values for name in _VARIABLE.findall(value)]


def access_headers(access: ServerAccess) -> dict[str, str]:
    """Return the headers of a request, with secrets. Raises InputError, like ``bearer``."""
    return {**fill_headers(access.headers), **bearer(access.api_key_env)}


def fill_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Replace ``${NAME}`` in headers. Raises InputError for an unset or unusable variable."""
    return {name: _filled(name, value) if "${" in value else value for name, value in headers.items()}


def _filled(name: str, value: str) -> str:
    return _VARIABLE.sub(lambda found: _value(found[1], f"header {name}"), value)


def bearer(variable: str) -> dict[str, str]:
    """Return the header with the key in this environment variable; empty without a variable. Raises
    InputError if it is unset, or invalid in a header; the message does not show the value."""
    return {"authorization": f"Bearer {_value(variable, 'api_key_env')}"} if variable else {}


def _value(variable: str, named_by: str) -> str:
    key = os.environ.get(variable, "")
    if not key:
        raise InputError(
            f"the environment variable {variable}, which {named_by} names, is not set",
            hint=f"export {variable}=… in the shell that starts kvbench",
        )
    if not _SENDABLE.fullmatch(key):
        raise InputError(
            f"the API key in {variable} has a space, a line break or another character that a header may not",
            hint="check for a line break at its end",
        )
    return key


def secret_values(names: Iterable[str]) -> dict[str, str]:
    """Return the set variables with their values, for a remote process that sends them. Pass them over a
    connection into that process's environment only."""
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def redact(text: str, names: Iterable[str]) -> str:
    """Remove the values of these variables from a text, and their beginnings at a cut."""
    for key in secret_values(names).values():
        text = _without(text, key)
    return text


def _without(text: str, key: str) -> str:
    text = text.replace(key, WITHHELD)
    end = text.removesuffix("…")
    for length in range(len(key) - 1, MIN_SHOWN - 1, -1):
        if end.endswith(key[:length]):
            return end[:-length] + WITHHELD
    return text


def tls_context(access: ServerAccess) -> ssl.SSLContext:
    """Return the trusted certificates. Raises InputError for an unreadable CA file."""
    chosen = os.environ.get("SSL_CERT_FILE", ""), os.environ.get("SSL_CERT_DIR", "")
    return _context(access.ca_file, access.insecure, chosen)


@cache
def _context(ca_file: str, insecure: bool, chosen: tuple[str, str]) -> ssl.SSLContext:
    """Trust ``ca_file`` alone if given; else those of ``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` (``chosen``,
    empty if unset), as in OpenSSL; else this machine's and certifi's."""
    import ssl

    if ca_file:
        try:
            context = ssl.create_default_context(cafile=str(Path(ca_file).expanduser()))
        except (OSError, ssl.SSLError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise InputError(
                f"the CA file {ca_file} cannot be used: {why}", hint="it must be a PEM file of certificates"
            ) from None
    else:
        context = ssl.create_default_context()  # reads both variables
        if not any(chosen):
            import certifi

            context.load_verify_locations(cafile=certifi.where())
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
