"""vLLM's MultiConnector: the first connector hands KV from P to D, the others are additional tiers such as
host memory, configured as for vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, JsonValue, ValidationError, model_validator

from kvbench import connectors
from kvbench.connectors.base import Body, Connector, ConnectorOptions, PrefillPeer, Role, Seat
from kvbench.core.engine_versions import Releases
from kvbench.core.ranks import Ranks
from kvbench.errors import InputError

_TIER: dict[str, JsonValue] = {
    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 2**30},
}


class MultiOptions(ConnectorOptions):
    first: Literal["nixl", "nixl_push", "mooncake"] = Field(
        "nixl", description="the connector that moves KV from P to D"
    )
    first_options: dict[str, JsonValue] = Field(default_factory=dict, description="its options")
    then: tuple[dict[str, JsonValue], ...] = Field(
        (_TIER,), min_length=1, max_length=8, description="the others, each as a kv_transfer_config"
    )

    @model_validator(mode="after")
    def _right(self) -> MultiOptions:
        try:
            connectors.get(self.first).options_model.model_validate(self.first_options)
        except ValidationError as error:
            wrong = error.errors()[0]
            place = ".".join(str(part) for part in wrong["loc"])
            raise ValueError(f"first_options of {self.first}: {place}: {wrong['msg']}") from error
        if any("kv_connector" not in member for member in self.then):
            raise ValueError("each mapping under `then` needs its kv_connector")
        return self

    @property
    def reads_nic_variables(self) -> bool:
        return self.inner_options().reads_nic_variables

    @property
    def requested_nics(self) -> tuple[str, ...]:
        return self.inner_options().requested_nics

    @property
    def requested_protocol(self) -> str | None:
        return self.inner_options().requested_protocol

    @property
    def bootstrap_address(self) -> str:
        return self.inner_options().bootstrap_address

    def inner_options(self) -> ConnectorOptions:
        """Return the first connector's options."""
        return connectors.get(self.first).options_model.model_validate(self.first_options)


class Multi(Connector):
    """Uses the first connector's handshake, ports and environment, and passes on all configurations."""

    name = "multi"
    title = "several connectors (MultiConnector)"
    kv_connector = "MultiConnector"
    options_model = MultiOptions
    releases = Releases((0, 9))
    history = "kvbench knows MultiConnector from vLLM 0.9 on"

    def __init__(self, first: Connector | None = None) -> None:
        self._first = connectors.get("nixl") if first is None else first
        self.dispatch = self._first.dispatch
        self.needs_bootstrap = self._first.needs_bootstrap
        self.needs_engine_id = self._first.needs_engine_id
        self.kv_operation = self._first.kv_operation
        self.side_port_roles = self._first.side_port_roles

    def profile(self, version: str = "", options: ConnectorOptions | None = None) -> Connector:
        super().profile(version)
        if not isinstance(options, MultiOptions):
            return Multi(connectors.get("nixl").profile(version))
        first = connectors.get(options.first)
        found = first.profile(version, first.options_model.model_validate(options.first_options))
        if found.v0_engine:
            raise InputError(
                f"{found.kv_connector} of vLLM {version} is of the V0 engine, which has no MultiConnector",
                hint=found.history,
            )
        return Multi(found)

    def ranks_problem(self, version: str, prefill: Ranks, decode: Ranks) -> str:
        return self._first.ranks_problem(version, prefill, decode)

    def options_problem(self, options: ConnectorOptions) -> str:
        return self._first.options_problem(self._inner(options))

    def side_ports(self, role: str, ranks: Ranks) -> int:
        return self._first.side_ports(role, ranks)

    def _inner(self, options: ConnectorOptions) -> ConnectorOptions:
        assert isinstance(options, MultiOptions)
        return options.inner_options()

    def kv_transfer_config(
        self, role: Role, engine_id: str, options: ConnectorOptions, seat: Seat | None = None
    ) -> dict[str, Any] | None:
        assert isinstance(options, MultiOptions)
        config = super().kv_transfer_config(role, engine_id, options, seat)
        first = self._first.kv_transfer_config(role, engine_id, self._inner(options), seat)
        assert config is not None
        assert first is not None
        # The engine id comes from the outer configuration; given twice it is an error.
        members = [{key: value for key, value in first.items() if key != "engine_id"}]
        members += [{"kv_role": "kv_both", **member} for member in options.then]
        config["kv_connector_extra_config"] = {"connectors": members}
        return config

    def env(self, role: Role, options: ConnectorOptions, side_port: int | None) -> dict[str, str]:
        return self._first.env(role, self._inner(options), side_port)

    def files(self, options: ConnectorOptions, seat: Seat) -> dict[str, dict[str, Any]]:
        return self._first.files(self._inner(options), seat)

    def warnings(self, options: ConnectorOptions, env: Mapping[str, str]) -> list[str]:
        return self._first.warnings(self._inner(options), env)

    def requested_transport(self, options: ConnectorOptions) -> str:
        return self._first.requested_transport(self._inner(options))

    def prefill_request(self, body: Body, request_id: str, peer: PrefillPeer) -> dict[str, Any]:
        return self._first.prefill_request(body, request_id, peer)

    def decode_request(
        self, body: Body, prefill_response: Body | None, request_id: str, peer: PrefillPeer
    ) -> dict[str, Any]:
        return self._first.decode_request(body, prefill_response, request_id, peer)

    def missing_in_prefill_response(self, prefill_response: Mapping[str, Any]) -> Sequence[str]:
        return self._first.missing_in_prefill_response(prefill_response)


CONNECTOR = Multi()
