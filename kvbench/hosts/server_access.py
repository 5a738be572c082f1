"""Access to a server: its secrets stay in the environment, and only their variables' names are written.

Specs, plans and command lines carry the names; who sends a request looks the values up at that moment. What
a server says back goes through ``hidden`` before it is kept, since some repeat the key that they refuse.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Final

from kvbench.core.access import ServerAccess
from kvbench.errors import InputError

WITHHELD: Final = "(API key)"
MIN_SHOWN: Final = 4
"""So many characters of a key are no secret yet."""
_SENDABLE: Final = re.compile(r"[\x21-\x7e]+")
_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def variables(access: ServerAccess) -> tuple[str, ...]:
    """The environment variables that requests to this server take their secrets from."""
    own = (access.api_key_env,) if access.api_key_env else ()
    return tuple(dict.fromkeys((*own, *named_in(access.headers.values()))))


def named_in(values: Iterable[str]) -> list[str]:
    """The variables that stand in headers' values as ``${NAME}``."""
    return [name for value in values for name in _VARIABLE.findall(value)]


def access_headers(access: ServerAccess) -> dict[str, str]:
    """The headers of a request, with the secrets in place. Raises InputError, as ``bearer`` does."""
    return {**filled(access.headers), **bearer(access.api_key_env)}


def filled(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers with their ``${NAME}`` replaced. Raises InputError for a variable that is unset or unfit."""
    return {name: _filled(name, value) if "${" in value else value for name, value in headers.items()}


def _filled(name: str, value: str) -> str:
    return _VARIABLE.sub(lambda found: _value(found[1], f"header {name}"), value)


def bearer(variable: str) -> dict[str, str]:
    """The header that carries the key of this environment variable; none for no variable.

    Raises InputError if it is unset, or holds what no header may; the message does not show the value.
    """
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
            hint="look for a stray line end at its end",
        )
    return key


def carried(names: Iterable[str]) -> dict[str, str]:
    """The variables with their values, for a process elsewhere that is to send them; none where none is set.

    To be handed over a connection, into that process's environment and nowhere else.
    """
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def hidden(text: str, names: Iterable[str]) -> str:
    """The text without the values of these variables, nor the beginning of one where a text was cut."""
    for key in carried(names).values():
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
    """Whose certificates are believed. Raises InputError for a CA file that cannot be read."""
    chosen = os.environ.get("SSL_CERT_FILE", ""), os.environ.get("SSL_CERT_DIR", "")
    return _context(access.ca_file, access.insecure, chosen)


@cache
def _context(ca_file: str, insecure: bool, chosen: tuple[str, str]) -> ssl.SSLContext:
    """``ca_file`` alone if there is one; else those of ``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` (``chosen``,
    empty where unset) where one is set, as in OpenSSL; else this machine's and those that certifi brings.
    """
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
