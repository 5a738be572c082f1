"""The contract of a connector: how the prefill instance hands its KV cache to the decode instance.

A connector is one file in this folder; its module name is its registration. It defines
``CONNECTOR``, a subclass instance of ``Connector``. The dispatch functions are pure and are the
one truth for the router and for the load generator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

Role = Literal["prefill", "decode", "aggregated"]
DispatchMode = Literal["none", "sequential", "concurrent"]

KV_ROLE: Mapping[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}


class ConnectorOptions(BaseModel):
    """Options of a connector in the scenario file; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class PrefillPeer:
    """The prefill instance chosen for a request, as the dispatch functions need it."""

    url: str
    bootstrap_url: str = ""
    engine_id: str = ""


class Connector(ABC):
    """How P hands its KV to D: engine configuration, environment, ports and request handshake."""

    name: ClassVar[str]
    title: ClassVar[str]
    dispatch: ClassVar[DispatchMode]
    kv_connector: ClassVar[str] = ""
    """The class name that goes into the engine's kv_transfer_config."""
    transfer_backend: ClassVar[str] = ""
    """The backend in kvbench.transfer that the emulated engine moves KV with."""
    needs_bootstrap: ClassVar[bool] = False
    """The router must ask P's bootstrap address for its engine id before the first request."""
    side_port_roles: ClassVar[tuple[Role, ...]] = ()
    """The roles that need one planned side-channel (or bootstrap) port per instance."""
    options_model: ClassVar[type[ConnectorOptions]] = ConnectorOptions

    @property
    def disaggregated(self) -> bool:
        return self.dispatch != "none"

    def kv_transfer_config(
        self, role: Role, engine_id: str, options: ConnectorOptions
    ) -> dict[str, Any] | None:
        """The engine's ``--kv-transfer-config`` for one instance; None without P/D."""
        if not self.disaggregated:
            return None
        return {
            "kv_connector": self.kv_connector,
            "kv_role": KV_ROLE[role],
            "engine_id": engine_id,
            "kv_connector_extra_config": self.extra_config(role, options),
        }

    def extra_config(self, role: Role, options: ConnectorOptions) -> dict[str, Any]:
        """Connector-specific keys of the kv_transfer_config."""
        return {}

    def env(self, role: Role, options: ConnectorOptions, side_port: int | None, host: str) -> dict[str, str]:
        """Environment of the engine process."""
        return {}

    def transport_asked(self, options: ConnectorOptions) -> str:
        """The transports that the options ask for, by commas; what really ran is checked against it."""
        return ""

    @abstractmethod
    def prefill_request(self, body: Mapping[str, Any], request_id: str, peer: PrefillPeer) -> dict[str, Any]:
        """The body to send to P for a client's body."""

    @abstractmethod
    def decode_request(
        self,
        body: Mapping[str, Any],
        prefill_response: Mapping[str, Any] | None,
        request_id: str,
        peer: PrefillPeer,
    ) -> dict[str, Any]:
        """The body to send to D; ``prefill_response`` is None with concurrent dispatch."""

    def missing_in_prefill_response(self, prefill_response: Mapping[str, Any]) -> Sequence[str]:
        """Fields that P should have answered but did not; a non-empty answer ends the request as an error."""
        return ()


def one_token_prefill(body: Mapping[str, Any], kv_transfer_params: Mapping[str, Any]) -> dict[str, Any]:
    """A client's body turned into P's: one token, not streamed, with the handshake's parameters.

    ``min_tokens`` and ``ignore_eos`` keep an end-of-sequence token on P from cancelling the
    hand-off: a request that ends by EOS on P sends no KV and leaves D waiting.
    """
    request = {key: value for key, value in body.items() if key != "stream_options"}
    request.update(stream=False, max_tokens=1, min_tokens=1, ignore_eos=True)
    if "max_completion_tokens" in request:
        request["max_completion_tokens"] = 1
    request["kv_transfer_params"] = dict(kv_transfer_params)
    return request
