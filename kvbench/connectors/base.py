"""The contract of a connector: how P hands its KV cache to D; hand-offs and options that several share.

A connector is one file in this folder; its module name is its registration. It defines ``CONNECTOR``, a
subclass instance of ``Connector``, whose pure dispatch functions serve the router and the load generator.

Releases of vLLM differ. Each way is a profile: a connector of its own, with the releases it is for.
``CONNECTOR`` is the newest one, which the emulated engine speaks too; ``CONNECTOR.profile(version)`` is the
one for an engine of that version.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal

from pydantic import Field, JsonValue, field_validator

from kvbench.core.engine_versions import Release, Releases, is_sglang, release
from kvbench.core.plan.dispatch import RANK_HEADER, BackendSpec
from kvbench.core.plan.processes import ProcessSpec
from kvbench.core.ranks import Ranks
from kvbench.core.scenario.options import ConnectorOptions as ConnectorOptions
from kvbench.core.scenario.options import nic_names
from kvbench.errors import InputError

Role = Literal["prefill", "decode", "aggregated"]
DispatchMode = Literal["none", "sequential", "concurrent"]
Body = Mapping[str, Any]
"""JSON of a request, or of an answer."""

KV_ROLE: Mapping[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer", "aggregated": "kv_both"}


BESIDE_EXTRA: Final = ("enable_permute_local_kv",)
"""Keys of connectors that vLLM reads from the kv_transfer_config itself."""


@dataclass(frozen=True)
class ExtraKey:
    """A key that a connector reads: the types of its values, and the releases of vLLM that read it."""

    kinds: tuple[type, ...]
    releases: Releases = field(default_factory=Releases)

    def takes(self, value: object) -> bool:
        return isinstance(value, self.kinds) and (bool in self.kinds or not isinstance(value, bool))


def key_since(first: Release, *kinds: type, until: Release | None = None) -> ExtraKey:
    """A key of the releases from ``first`` on; whole numbers are taken for others."""
    return ExtraKey((*kinds, int) if float in kinds else kinds, Releases(first, until))


ExtraKeys = Mapping[str, ExtraKey]


class KvOptions(ConnectorOptions):
    """Options of a connector of vLLM's: its own keys go through as they are."""

    keys: ClassVar[ExtraKeys] = {}
    """The keys that kvbench knows, beside those that follow from options (recorded/vllm/connectors.yaml)."""
    follow: ClassVar[Mapping[str, str]] = {}  # keys → options of another name

    extra_config: dict[str, JsonValue] = Field(
        default_factory=dict, description="further keys of kv_connector_extra_config, word for word"
    )

    @field_validator("extra_config")
    @classmethod
    def _fits(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name, value in given.items():
            option, known = cls.follow.get(name, name), cls.keys.get(name)
            if option in cls.model_fields and option != "extra_config":
                raise ValueError(f"{name} follows from the option {option}")
            if known is not None and not known.takes(value):
                kinds = " or ".join(kind.__name__ for kind in known.kinds)
                raise ValueError(f"{name} must be {kinds}, not {value!r}")
        return given

    def key_notes(self, version: str) -> Iterator[str]:
        """What a vLLM of that version (empty: unknown) is not known to read."""
        for name in self.extra_config:
            known = self.keys.get(name)
            if known is None:
                yield f"extra_config: kvbench does not know the key {name}; it is passed on as it is"
            elif version and release(version) not in known.releases:
                yield f"extra_config: {name} is a key of {known.releases}, and this is {version}"


@dataclass(frozen=True)
class PrefillPeer:
    """The prefill instance chosen for a request, as the dispatch functions need it."""

    url: str
    bootstrap_url: str = ""
    engine_id: str = ""
    side_address: str = ""
    """``host:port`` of its side channel."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_rank: int | None = None
    """The data-parallel rank that computes the prompt, where P has several that D must know apart."""

    @property
    def headers(self) -> dict[str, str]:
        """What sends P's request to that rank."""
        return {} if self.data_rank is None else {RANK_HEADER: str(self.data_rank)}


def peer_at(spec: BackendSpec, engine_ids: Sequence[str], turn: int) -> PrefillPeer:
    """The rank of a prefill server whose turn it is, as vLLM's own proxy goes round (server, rank)."""
    rank = turn % len(engine_ids) if len(engine_ids) > 1 else None
    addresses = spec.side_addresses or [spec.side_address]
    return PrefillPeer(
        spec.url,
        spec.bootstrap_url,
        engine_ids[rank or 0] if engine_ids else "",
        addresses[(rank or 0) % len(addresses)],
        spec.tensor_parallel_size,
        spec.pipeline_parallel_size,
        rank,
    )


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

    def ranks_problem(self, version: str, prefill: Ranks, decode: Ranks) -> str:
        """Why it moves no KV between instances with these ranks; empty if it does, or that is not known."""
        return ""

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
        more = options.extra_config if isinstance(options, KvOptions) else {}
        return {
            "kv_connector": self.kv_connector,
            "kv_role": KV_ROLE[role],
            "engine_id": engine_id,
            **{key: value for key, value in more.items() if key in BESIDE_EXTRA},
            "kv_connector_extra_config": {
                **self.extra_config(role, options),
                **{key: value for key, value in more.items() if key not in BESIDE_EXTRA},
            },
        }

    def extra_config(self, role: Role, options: ConnectorOptions) -> dict[str, Any]:
        """Connector-specific keys of the kv_transfer_config."""
        return {}

    def env(self, role: Role, options: ConnectorOptions, side_port: int | None) -> dict[str, str]:
        """Environment of the engine process; its addresses are the engine's to say, for each node its own."""
        return {}

    def seat_env(self, options: ConnectorOptions, seat: Seat) -> dict[str, str]:
        """The same, for who must know more of the deployment."""
        return self.env(seat.role, options, seat.side_port)

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


class _UnchangedOnD(Connector):
    """D gets a client's body as it is."""

    def decode_request(
        self, body: Body, prefill_response: Body | None, request_id: str, peer: PrefillPeer
    ) -> dict[str, Any]:
        return dict(body)


class PlainConnector(_UnchangedOnD):
    """Sequential dispatch with unchanged bodies, except that P makes one token only.

    P computes the whole prompt first. D finds the KV by the prompt's tokens or by the request id, so the
    request needs no parameters (proxy_server.py of vLLM 0.6, and connectors over a shared store).
    """

    dispatch = "sequential"

    def prefill_request(self, body: Body, request_id: str, peer: PrefillPeer) -> dict[str, Any]:
        return one_token_prefill(body)


class LoneConnector(_UnchangedOnD):
    """One server with a connector of its own: no P/D, requests are passed on as they are."""

    dispatch = "none"

    def prefill_request(self, body: Body, request_id: str, peer: PrefillPeer) -> dict[str, Any]:
        raise NotImplementedError(f"{self.name} runs one server and has no prefill request")


class PullConnector(Connector):
    """Sequential dispatch: P's answer carries ``kv_transfer_params`` that go to D untouched.

    This is the dialect of vLLM's NixlConnector from 0.13 to 0.33 (toy_proxy_server.py).
    """

    dispatch: DispatchMode = "sequential"
    side_port_roles: tuple[Role, ...] = ("prefill", "decode")
    answer_fields: ClassVar[tuple[str, ...]] = (
        "remote_block_ids",
        "remote_engine_id",
        "remote_host",
        "remote_port",
    )
    """What P's ``kv_transfer_params`` must hold for D to find the blocks."""

    def prefill_request(self, body: Body, request_id: str, peer: PrefillPeer) -> dict[str, Any]:
        return one_token_prefill(
            body,
            {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_host": None,
                "remote_port": None,
            },
        )

    def decode_request(
        self, body: Body, prefill_response: Body | None, request_id: str, peer: PrefillPeer
    ) -> dict[str, Any]:
        return {**body, "kv_transfer_params": (prefill_response or {}).get("kv_transfer_params")}

    def missing_in_prefill_response(self, prefill_response: Mapping[str, Any]) -> Sequence[str]:
        params = prefill_response.get("kv_transfer_params")
        if not isinstance(params, Mapping):
            return ("kv_transfer_params",)
        return tuple(f"kv_transfer_params.{key}" for key in self.answer_fields if params.get(key) is None)


class RoomConnector(Connector):
    """SGLang's hand-off: P and D get the request at once and meet in a "room" on P's bootstrap server.

    The router adds ``bootstrap_host``, ``bootstrap_port`` and ``bootstrap_room`` (a random number of 63 bits)
    to both bodies (SGLang 0.5, sglang_router). Only P binds a bootstrap port. Not run here: SGLang needs a
    GPU.
    """

    dispatch = "concurrent"
    side_port_roles: tuple[Role, ...] = ("prefill",)

    def prefill_request(self, body: Body, request_id: str, peer: PrefillPeer) -> dict[str, Any]:
        # P's own answer is thrown away, so it need not come as a stream.
        request = {key: value for key, value in body.items() if key != "stream_options"}
        return {**request, "stream": False, **room_of(request_id, peer)}

    def decode_request(
        self, body: Body, prefill_response: Body | None, request_id: str, peer: PrefillPeer
    ) -> dict[str, Any]:
        return {**body, **room_of(request_id, peer)}


def room_of(request_id: str, peer: PrefillPeer) -> dict[str, Any]:
    """The three fields that join a request on P and on D. The room follows from the request's id."""
    host, _, port = peer.side_address.rpartition(":")
    number = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "big") >> 1
    return {"bootstrap_host": host, "bootstrap_port": int(port or 0), "bootstrap_room": number}


TELLING: Final = {"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y"}
"""Lines at start-up and at each new connection, none at transfers."""


class UcxOptions(KvOptions):
    """Options of a connector over NIXL."""

    keys: ClassVar[ExtraKeys] = {
        "bidirectional_kv_xfer": key_since((0, 21), bool),
        "decoder_kv_blocks_ttl": key_since((0, 22), float),
        "enable_cross_layers_blocks": key_since((0, 16), bool, str, until=(0, 29)),
        "enable_permute_local_kv": key_since((0, 11, 1), bool),
        "enforce_handshake_compat": key_since((0, 13), bool),
        "engine_ttl": key_since((0, 24), float),
        "kv_lease_duration": key_since((0, 22), float),
        "kv_recompute_threshold": key_since((0, 21), int),
        "push_registration_timeout": key_since((0, 24), float),
    }

    ucx_tls: str = Field(
        "",
        description="UCX_TLS: the transports UCX may use; by default its own choice, for the emulated engine "
        "tcp. GPU memory needs cuda among them",
    )
    ucx_net_devices: str = Field("", description="UCX_NET_DEVICES: comma-separated devices, or all")
    num_threads: int | None = Field(
        None,
        ge=0,
        le=64,
        description="NIXL worker threads beside the progress thread; by default the engine's own choice, "
        "4 in vLLM, for the emulated one 0",
    )

    backends: tuple[Literal["UCX", "LIBFABRIC"], ...] = Field(
        ("UCX",),
        min_length=1,
        description="NIXL's backends, real engines only: LIBFABRIC for EFA, which UCX emulates in software",
    )

    def settled(self) -> UcxOptions:
        threads = 0 if self.num_threads is None else self.num_threads
        return self.model_copy(update={"ucx_tls": self.ucx_tls or "tcp", "num_threads": threads})

    @property
    def nics_asked(self) -> tuple[str, ...]:
        return nic_names(self.ucx_net_devices)

    def nixl_config(self) -> dict[str, Any]:
        """The keys of vLLM's kv_connector_extra_config; without a number of threads vLLM takes its own."""
        threads = {} if self.num_threads is None else {"num_threads": self.num_threads}
        return {"backends": list(self.backends), **threads}

    def env(self) -> dict[str, str]:
        """UCX's environment; what is not given there it chooses: transports, and devices among all.

        UCX_TLS without cuda would make NIXL 1.0 and newer refuse GPU memory. It is to say which transports it
        took, once a connection and operation (transfer/parts/transport_lines.yaml).
        """
        wanted = {"UCX_TLS": self.ucx_tls, "UCX_NET_DEVICES": self.ucx_net_devices}
        return {**{name: value for name, value in wanted.items() if value}, **TELLING}


def moves_gpu_memory(tls: str) -> bool:
    """Whether UCX_TLS, where it is set at all, leaves UCX a transport for CUDA's or ROCm's memory."""
    words = [word.strip() for word in tls.removeprefix("^").split(",") if word.strip()]
    named = any(word == "all" or word.startswith(("cuda", "gdr", "rocm", "ze")) for word in words)
    return not words or named != tls.startswith("^")


def ucx_warnings(options: ConnectorOptions, env: Mapping[str, str]) -> list[str]:
    """What of the user's options and environment is ignored."""
    assert isinstance(options, UcxOptions)
    found = []
    if "UCX" not in options.backends and (options.ucx_tls or options.ucx_net_devices):
        found.append("ucx_tls and ucx_net_devices do nothing, since UCX is not among the backends")
    for name in ("MOONCAKE_PROTOCOL", "MOONCAKE_DEVICE"):
        if name in env:
            found.append(f"{name} is set, but NIXL never reads it")
    return found
