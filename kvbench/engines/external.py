"""An external server, known by its base URL."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from kvbench.connectors.base import Connector, ConnectorOptions
from kvbench.core.access import ServerAccess
from kvbench.core.plan.processes import ProcessSpec
from kvbench.core.scenario.options import RunningServer
from kvbench.engines.base import Engine, EngineOptions, Instance
from kvbench.errors import InputError, Problem

_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_HEADER_VALUE: Final = re.compile(r"[\x20-\x7e]{1,4000}")
_RESERVED_HEADERS: Final = frozenset(
    {"host", "content-length", "content-type", "transfer-encoding", "connection", "accept", "x-request-id"}
)
_SECRET: Final = re.compile(r"auth|cookie|key|token|secret|passw|credential", re.IGNORECASE)
_UNSEEN: Final = re.compile(r"[\x00-\x20\x7f-\xa0]")


def url_problem(url: str) -> str:
    """Problem with a server's URL, shown without its login, or ""."""
    try:
        parts = urlsplit(url)
        # urlsplit drops these; other libraries would send them.
        if _UNSEEN.search(url):
            return "must not have spaces, line breaks or other invisible characters"
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            return "must be an http:// or https:// URL with a host, and a port from 1 to 65535 if it has one"
    except ValueError:
        return "must be an http:// or https:// URL with a host, and a port from 1 to 65535 if it has one"
    if "@" in parts.netloc:
        return (
            "must not contain a login, which files of the run would show; put the key into an environment "
            "variable and name it in api_key_env"
        )
    return ""


def header_problem(name: str, value: str) -> str:
    """Why a header cannot be sent, or not without storing a secret, or ""."""
    if not _HEADER_NAME.fullmatch(name):
        return f"{name[:40]!r} is not a header name"
    if name.lower() in _RESERVED_HEADERS:
        return f"the header {name} is kvbench's own"
    if not _HEADER_VALUE.fullmatch(value):
        return f"the header {name} must have a value of visible ASCII characters, in one line"
    if _SECRET.search(name) and "${" not in value:
        return (
            f"the header {name} looks like a secret, which files of the run would show: put it into an "
            f"environment variable and write {name}: ${{NAME}}, in single quotes on a command line"
        )
    return ""


def each_url(urls: str) -> list[str]:
    return [url.strip() for url in urls.split(",")] if urls else []


class ExternalOptions(EngineOptions):
    starts_processes = False
    uses_gpus = False

    base_url: str = Field(
        ..., min_length=1, description="base URL of any OpenAI-compatible server or P/D router"
    )
    prefill_metrics_url: str = Field(
        "",
        description="P's /metrics, so that gates can prove that P and D both worked; of several, with commas",
    )
    decode_metrics_url: str = Field(
        "", description="D's /metrics, of several with commas; of the server itself if there is no P/D"
    )
    api_key_env: str = Field(
        "",
        pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$",
        description="environment variable with the server's API key, sent as Authorization: Bearer; "
        "the key itself is never stored",
    )
    headers: dict[str, str] = Field(
        default_factory=dict,
        max_length=64,
        description="further headers of each request; ${NAME} in a value is an environment variable, "
        "which is inserted when sent, and never stored",
    )
    ca_file: str = Field(
        "",
        max_length=4096,
        description="PEM file of trusted certificates, instead of the machine's; on the host that "
        "sends the requests",
    )
    insecure: bool = Field(False, description="skip TLS verification")

    max_model_len: int | None = Field(
        None, ge=2, description="longest input plus output of a request that the server accepts, in tokens"
    )
    gpus: int | None = Field(
        None, ge=1, le=65536, description="GPUs behind base_url, in total; enables rates per GPU"
    )
    dummy_weights: bool = Field(
        False, description="whether weights are random, so that different prompts may have the same answer"
    )

    @field_validator("base_url")
    @classmethod
    def _usable(cls, url: str) -> str:
        if problem := url_problem(url):
            raise PydanticCustomError("kvbench", "{text}", {"text": problem})
        return url

    @field_validator("prefill_metrics_url", "decode_metrics_url")
    @classmethod
    def _all_usable(cls, urls: str) -> str:
        if problem := next(filter(None, map(url_problem, each_url(urls))), ""):
            raise PydanticCustomError("kvbench", "{text}", {"text": problem})
        return urls

    @field_validator("headers")
    @classmethod
    def _sendable(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            if problem := header_problem(name, value):
                raise PydanticCustomError("kvbench", "{text}", {"text": problem})
        return headers

    @property
    def answers_alike(self) -> bool:
        return self.dummy_weights

    @property
    def longest_request(self) -> int | None:
        return self.max_model_len

    @property
    def server(self) -> RunningServer:
        given = {"prefill": self.prefill_metrics_url, "decode": self.decode_metrics_url}
        metrics = {
            f"{role}-{rank}": url for role, urls in given.items() for rank, url in enumerate(each_url(urls))
        }
        access = ServerAccess(self.api_key_env, self.headers, self.ca_file, self.insecure)
        return RunningServer(self.base_url, metrics, access)


class External(Engine):
    """Starts and stops nothing."""

    name = "external"
    options_model = ExternalOptions

    def check(self, connector: Connector, options: EngineOptions | None = None) -> Problem | None:
        return None

    def process(
        self,
        instance: Instance,
        connector: Connector,
        connector_options: ConnectorOptions,
        options: EngineOptions,
    ) -> ProcessSpec:
        raise InputError(
            "an external server is not launched by kvbench", hint="use `kvbench sweep --base-url`"
        )


ENGINE = External()
