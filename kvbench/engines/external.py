"""A server that somebody else has launched: kvbench only needs its base URL."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from kvbench.connectors.base import Connector, ConnectorOptions
from kvbench.core.plan.processes import ProcessSpec
from kvbench.core.scenario.options import RunningServer
from kvbench.engines.base import Engine, EngineOptions, Instance
from kvbench.errors import InputError, Problem

_UNSEEN: Final = re.compile(r"[\x00-\x20\x7f-\xa0]")


def url_problem(url: str) -> str:
    """What is wrong with a server's URL, without the login that may stand in it; empty if nothing is."""
    try:
        parts = urlsplit(url)
        # What urlsplit drops, others would send.
        if _UNSEEN.search(url):
            return "must not have spaces, line breaks or other unseen characters in it"
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            return "must be an http:// or https:// URL with a host, and a port from 1 to 65535 if it has one"
    except ValueError:
        return "must be an http:// or https:// URL with a host, and a port from 1 to 65535 if it has one"
    if "@" in parts.netloc:
        return (
            "must not carry a login, which every file of the run would show; put the key into an environment "
            "variable and name it in api_key_env"
        )
    return ""


def each_url(urls: str) -> list[str]:
    """The URLs of a list with commas between."""
    return [url.strip() for url in urls.split(",")] if urls else []


class ExternalOptions(EngineOptions):
    """Where the server under test answers."""

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
        "the key itself is written nowhere",
    )

    dummy_weights: bool = Field(
        False, description="its weights are made up, so that different prompts may have the same answer"
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

    @property
    def answers_alike(self) -> bool:
        return self.dummy_weights

    @property
    def server(self) -> RunningServer:
        given = {"prefill": self.prefill_metrics_url, "decode": self.decode_metrics_url}
        metrics = {
            f"{role}-{rank}": url for role, urls in given.items() for rank, url in enumerate(each_url(urls))
        }
        return RunningServer(self.base_url, metrics, self.api_key_env)


class External(Engine):
    """Starts nothing and stops nothing."""

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
