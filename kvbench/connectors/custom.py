"""Any connector class of vLLM or the user, by name and module. Options give what kvbench cannot know: P/D or
not, the request hand-over, and the variable for a side channel's port."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from kvbench.connectors.base import (
    Connector,
    ConnectorOptions,
    KvOptions,
    LoneConnector,
    PlainConnector,
    PullConnector,
    Role,
    Seat,
)
from kvbench.core.engine_versions import Releases


class CustomOptions(KvOptions):
    kv_connector: str = Field("ExampleConnector", min_length=1, description="name of the connector's class")
    kv_connector_module_path: str = Field("", description="its Python module, if vLLM does not know it")
    handshake: Literal["plain", "answer", "none"] = Field(
        "plain",
        description="plain: P first, then D; answer: P's kv_transfer_params go to D; none: one server",
    )
    port_env: str = Field("", description="environment variable that gets a planned port in each instance")

    def key_notes(self, version: str) -> Iterator[str]:
        yield from ()  # the keys are the class's own


def _options(options: ConnectorOptions) -> CustomOptions:
    assert isinstance(options, CustomOptions)
    return options


class _Settings(Connector):
    """The user's description of the class."""

    name = "custom"
    title = "custom connector class"
    kv_connector = "(custom)"
    options_model = CustomOptions
    side_port_roles: tuple[Role, ...] = ("prefill", "decode", "aggregated")
    releases = Releases((0, 9))
    history = "kvbench takes connector classes of vLLM's V1 engine, from 0.9 on"

    def kv_transfer_config(
        self, role: Role, engine_id: str, options: ConnectorOptions, seat: Seat | None = None
    ) -> dict[str, Any] | None:
        chosen = _options(options)
        config = super().kv_transfer_config(role, engine_id, options, seat)
        assert config is not None
        config["kv_connector"] = chosen.kv_connector
        if chosen.kv_connector_module_path:
            config["kv_connector_module_path"] = chosen.kv_connector_module_path
        return config

    def env(self, role: Role, options: ConnectorOptions, side_port: int | None) -> dict[str, str]:
        name = _options(options).port_env
        return {name: str(side_port)} if name and side_port else {}


class CustomLone(LoneConnector, _Settings):
    """One server without P/D."""


class CustomAnswer(PullConnector, _Settings):
    """Copies P's response to D."""

    side_port_roles: tuple[Role, ...] = ("prefill", "decode")
    answer_fields = ()


class Custom(PlainConnector, _Settings):
    """P first, then D, with unchanged bodies; options select other handshakes."""

    def profile(self, version: str = "", options: ConnectorOptions | None = None) -> Connector:
        super().profile(version)
        kinds: dict[str, type[Connector]] = {"plain": Custom, "answer": CustomAnswer, "none": CustomLone}
        return kinds[options.handshake if isinstance(options, CustomOptions) else "plain"]()


CONNECTOR = Custom()
