"""The contract of a connector: how the prefill instance hands its KV cache to the decode instance.

A connector is one file in this folder; its module name is its registration. It defines
``CONNECTOR``, a subclass instance of ``Connector``. The dispatch functions are pure and are the
one truth for the router and for the load generator.

What a connector wants differs between releases of vLLM. Each way is a profile: a connector of its
own, with the releases it is for. ``CONNECTOR`` is the newest one, which the emulated engine speaks
too, and ``CONNECTOR.profile(version)`` is the one for an engine of that version.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from kvbench.core.engine_versions import Release, Releases, is_sglang, release
from kvbench.core.plan.processes import ProcessSpec
from kvbench.core.ranks import Ranks
from kvbench.core.scenario.options import ConnectorOptions as ConnectorOptions
from kvbench.errors import InputError

Role = Literal["prefill", "decode", "aggregated"]
DispatchMode = Literal["none", "sequential", "concurrent"]
Body = Mapping[str, Any]
"""JSON of a request, or of an answer."""

KV_ROLE: Mapping[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer", "aggregated": "kv_both"}


@dataclass(frozen=True)
class PrefillPeer:
    """The prefill instance chosen for a request, as the dispatch functions need it."""

    url: str
    bootstrap_url: str = ""
    engine_id: str = ""
    side_address: str = ""
    """``host:port`` of its side channel."""
    tensor_parallel_size: int = 1


@dataclass(frozen=True)
class Neighbours:
    """What an instance may have to know of the rest of its deployment: ``host:port`` of side channels."""

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    services: tuple[str, ...] = ()
    """Addresses of the connector's own helper processes, one per planned service port."""


@dataclass(frozen=True)
class Seat:
    """One engine instance as a connector sees it."""

    role: Role
    rank: int
    host: str
    side_port: int | None
    tensor_parallel_size: int = 1
    neighbours: Neighbours = field(default_factory=Neighbours)


class Connector(ABC):
    """How P hands its KV to D: engine configuration, environment, ports and request handshake."""

    name: ClassVar[str]
    title: ClassVar[str]
    dispatch: DispatchMode
    kv_connector: ClassVar[str] = ""
    """The class name that goes into the engine's kv_transfer_config; empty without one."""
    transfer_backend: ClassVar[str] = ""
    """The backend in kvbench.transfer that the emulated engine moves KV with; empty: it cannot."""
    needs_bootstrap: bool = False
    """The router must ask P's bootstrap address for its engine id before the first request."""
    needs_engine_id: bool = False
    """The dispatcher must know P's engine id and ranks from its start."""
    side_port_roles: tuple[Role, ...] = ()
    """The roles that need planned side-channel (or bootstrap) ports."""
    side_port_per_rank: ClassVar[bool] = False
    """Each tensor-parallel rank of each data-parallel one takes one, from the planned port upwards."""
    side_port_per_data_rank: ClassVar[bool] = False
    """Each data-parallel rank takes one; if neither is so, the instance does."""
    service_ports: ClassVar[int] = 0
    """Ports of the connector's own helper processes, planned once for the deployment."""
    true_outputs: ClassVar[bool] = True
    """False if D computes from invented KV, so that its outputs cannot equal the aggregated server's."""
    whole_prompt: ClassVar[bool] = True
    """False if D gets whole blocks only, or only those that are there in time, and computes the rest."""
    kv_operation: Literal["read", "write", ""] = ""
    """By what its library moves KV: D reads P's memory, or P writes D's; empty: neither, or unknown."""
    gpu_only: ClassVar[bool] = False
    """vLLM's class refuses to run on CPUs."""
    v0_engine: ClassVar[bool] = False
    """It is a class of vLLM's V0 engine."""
    options_model: ClassVar[type[ConnectorOptions]] = ConnectorOptions

    releases: ClassVar[Releases] = Releases()
    """The vLLM releases that this profile is for."""
    older: ClassVar[tuple[type[Connector], ...]] = ()
    """Profiles for earlier releases."""
    sglang: ClassVar[type[Connector] | None] = None
    """The profile for SGLang."""
    history: ClassVar[str] = ""
    """In which releases the class exists, for who asks for another one."""
    load_failure_policy_since: ClassVar[Release] = (0, 13)
    """Releases from this one on know ``kv_load_failure_policy``."""

    @property
    def disaggregated(self) -> bool:
        return self.dispatch != "none"

    def profile(self, version: str = "", options: ConnectorOptions | None = None) -> Connector:
        """The profile for an engine version such as "0.13.0" or "sglang"; empty is the newest.

        A connector whose hand-off depends on its options looks at these too.
        A release newer than all that are known takes the newest profile.
        Raises InputError if that engine has no such connector.
        """
        if not version or not self.kv_connector:
            return self
        if is_sglang(version):
            if self.sglang is None:
                raise InputError(
                    f"kvbench knows no {self.name} for SGLang", hint="mooncake and nixl are known"
                )
            return self.sglang()
        wanted = release(version)
        for known in (type(self), *self.older):
            if wanted in known.releases:
                return known()
        what = self.kv_connector or self.name
        raise InputError(
            f"vLLM {version} has no {what}", hint=self.history or f"it came with {self.releases}"
        )

    def side_ports(self, role: str, ranks: Ranks) -> int:
        """How many consecutive side ports an instance of a role takes."""
        if role not in self.side_port_roles:
            return 0
        if self.side_port_per_rank:
            return ranks.tensor * ranks.data
        return ranks.data if self.side_port_per_data_rank else 1

    def kv_transfer_config(
        self, role: Role, engine_id: str, options: ConnectorOptions, seat: Seat | None = None
    ) -> dict[str, Any] | None:
        """The engine's ``--kv-transfer-config`` for one instance; None if nothing is to be configured."""
        if not self.kv_connector:
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

    def seat_env(self, options: ConnectorOptions, seat: Seat) -> dict[str, str]:
        """The same, for who must know more of the deployment."""
        return self.env(seat.role, options, seat.side_port, seat.host)

    def files(self, options: ConnectorOptions, seat: Seat) -> dict[str, dict[str, Any]]:
        """JSON files that an instance reads: environment variable with its path → content."""
        return {}

    def engine_args(self, role: Role, options: ConnectorOptions) -> dict[str, Any]:
        """Arguments of ``vllm serve`` without which the connector does not work."""
        return {}

    def services(self, options: ConnectorOptions, host: str, ports: Sequence[int]) -> list[ProcessSpec]:
        """Helper processes that must run before the engines, on ``service_ports`` planned ports."""
        return []

    def warnings(self, options: ConnectorOptions, env: Mapping[str, str]) -> list[str]:
        """Settings of the user that this profile ignores or that harm."""
        return []

    def transport_asked(self, options: ConnectorOptions) -> str:
        """The transports that the options ask for, by commas; what really ran is checked against it."""
        return ""

    @abstractmethod
    def prefill_request(self, body: Body, request_id: str, peer: PrefillPeer) -> dict[str, Any]:
        """The body to send to P for a client's body."""

    @abstractmethod
    def decode_request(
        self, body: Body, prefill_response: Body | None, request_id: str, peer: PrefillPeer
    ) -> dict[str, Any]:
        """The body to send to D; ``prefill_response`` is None with concurrent dispatch."""

    def missing_in_prefill_response(self, prefill_response: Mapping[str, Any]) -> Sequence[str]:
        """Fields that P should have answered but did not; a non-empty answer ends the request as an error."""
        return ()

    def backend_request_id(self, request_id: str, peer: PrefillPeer, decode_side_address: str) -> str:
        """The ``X-Request-Id`` that P and D get."""
        return request_id


def one_token_prefill(
    body: Mapping[str, Any], kv_transfer_params: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A client's body turned into P's: one token, not streamed, with the handshake's parameters if any.

    ``min_tokens`` and ``ignore_eos`` keep an end-of-sequence token on P from cancelling the
    hand-off: a request that ends by EOS on P sends no KV and leaves D waiting.
    """
    request = {key: value for key, value in body.items() if key not in ("stream_options", "return_token_ids")}
    request.update(stream=False, max_tokens=1, min_tokens=1, ignore_eos=True)
    if "max_completion_tokens" in request:
        request["max_completion_tokens"] = 1
    if kv_transfer_params is not None:
        request["kv_transfer_params"] = dict(kv_transfer_params)
    return request
