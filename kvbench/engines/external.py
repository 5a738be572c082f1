"""A server that somebody else has launched: kvbench only needs its base URL."""

from __future__ import annotations

from pydantic import Field

from kvbench.connectors.base import Connector, ConnectorOptions
from kvbench.core.processes import ProcessSpec
from kvbench.engines.base import Engine, EngineOptions, Instance
from kvbench.errors import InputError
from kvbench.transfer.base import Problem


class ExternalOptions(EngineOptions):
    """Where the server under test answers."""

    base_url: str = Field(
        ..., min_length=1, description="base URL of any OpenAI-compatible server or P/D router"
    )
    prefill_metrics_url: str = Field(
        "", description="P's /metrics, so that gates can prove that P and D both worked"
    )
    decode_metrics_url: str = Field("", description="D's /metrics; of the server itself if there is no P/D")


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
