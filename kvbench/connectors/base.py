"""Interface of a connector, which hands KV from P to D, with shared hand-offs and options.

A connector is a file in this folder, registered by its module name, with ``CONNECTOR``, an instance of a
``Connector`` subclass. Its pure dispatch functions serve router and load generator. Each incompatible range
of vLLM releases has its own profile: ``CONNECTOR`` is the newest, also used by the emulated engine;
``CONNECTOR.profile(version)`` returns that of a version."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal

from pydantic import Field, JsonValue, field_validator

from kvbench.core.engine_versions import Release, Releases, is_sglang, release
from kvbench.core.load.dispatch import RANK_HEADER, BackendSpec
from kvbench.core.plan.processes import ProcessSpec
from kvbench.core.ranks import Ranks
from kvbench.core.scenario.options import ConnectorOptions as ConnectorOptions
from kvbench.core.scenario.options import nic_names
from kvbench.errors import InputError

Role = Literal["prefill", "decode", "aggregated"]
DispatchMode = Literal["none", "sequential", "concurrent"]
Body = Mapping[str, Any]
"""JSON of a request or response."""

KV_ROLE: Mapping[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer", "aggregated": "kv_both"}


BESIDE_EXTRA: Final = ("enable_permute_local_kv",)
"""Keys of connectors that vLLM reads from the kv_transfer_config itself."""


@dataclass(frozen=True)
class ExtraKey:
    """Value types of a connector's key, and the vLLM releases that read it."""

    kinds: tuple[type, ...]
    releases: Releases = field(default_factory=Releases)

    def takes(self, value: object) -> bool:
        return isinstance(value, self.kinds) and (bool in self.kinds or not isinstance(value, bool))


def key_since(first: Release, *kinds: type, until: Release | None = None) -> ExtraKey:
    """Create a key for releases from ``first`` on; integers also match other types."""
    return ExtraKey((*kinds, int) if float in kinds else kinds, Releases(first, until))


ExtraKeys = Mapping[str, ExtraKey]


class KvOptions(ConnectorOptions):
    """Options of a vLLM connector; its own keys are passed through."""

    keys: ClassVar[ExtraKeys] = {}
    """Known keys, besides those derived from options (recorded/vllm/connectors.yaml)."""
    follow: ClassVar[Mapping[str, str]] = {}  # keys → options of another name

    extra_config: dict[str, JsonValue] = Field(
        default_factory=dict, description="further keys of kv_connector_extra_config, unchanged"
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
        """Warn about keys unknown to a vLLM version (empty: unknown)."""
        for name in self.extra_config:
            known = self.keys.get(name)
            if known is None:
                yield f"extra_config: kvbench does not know the key {name}; it is passed on unchanged"
            elif version and release(version) not in known.releases:
                yield f"extra_config: {name} is a key of {known.releases}, and this is {version}"


@dataclass(frozen=True)
class PrefillPeer:
    """Prefill instance of a request, for the dispatch functions."""

    url: str
    bootstrap_url: str = ""
    engine_id: str = ""
    side_address: str = ""
    """``host:port`` of its side channel."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_rank: int | None = None
    """Data-parallel rank for the prompt, if D must know P's rank."""

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.data_rank is None else {RANK_HEADER: str(self.data_rank)}


def peer_at(spec: BackendSpec, engine_ids: Sequence[str], turn: int) -> PrefillPeer:
    """Choose the next prefill rank in turn, as vLLM's own proxy does (server, rank)."""
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
    """Other instances' side channels as ``host:port``."""

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    services: tuple[str, ...] = ()
    """Addresses of the connector's helper processes, one per planned service port."""


@dataclass(frozen=True)
class Seat:
    role: Role
    rank: int
    host: str
    side_port: int | None
    tensor_parallel_size: int = 1
    neighbours: Neighbours = field(default_factory=Neighbours)


class Connector(ABC):
    """Hands KV from P to D: engine configuration, environment, ports and request handshake."""

    name: ClassVar[str]
    title: ClassVar[str]
    dispatch: DispatchMode
    kv_connector: ClassVar[str] = ""
    """Class name for the engine's kv_transfer_config, or ""."""
    transfer_backend: ClassVar[str] = ""
    """kvbench.transfer backend for the emulated engine, or "" if unsupported."""
    needs_bootstrap: bool = False
    """Whether the router must query P's bootstrap address for its engine id."""
    needs_engine_id: bool = False
    """Whether the dispatcher must know P's engine id and ranks from the start."""
    side_port_roles: tuple[Role, ...] = ()
    side_port_per_rank: ClassVar[bool] = False
    """Whether each tensor-parallel rank has a side port, counted up from the planned one."""
    side_port_per_data_rank: ClassVar[bool] = False
    """Whether each data-parallel rank has a side port; otherwise the instance has one."""
    service_ports: ClassVar[int] = 0
    """Number of helper process ports, once per deployment."""
    true_outputs: ClassVar[bool] = True
    """False if D uses invented KV, so outputs cannot match the aggregated server's."""
    whole_prompt: ClassVar[bool] = True
    """False if D may receive only whole or timely blocks and recompute the rest."""
    kv_operation: Literal["read", "write", ""] = ""
    """Transfer operation: D reads P's memory, or P writes D's; empty: neither, or unknown."""
    gpu_only: ClassVar[bool] = False
    """Whether vLLM's class refuses CPUs."""
    v0_engine: ClassVar[bool] = False
    options_model: ClassVar[type[ConnectorOptions]] = ConnectorOptions

    releases: ClassVar[Releases] = Releases()
    """vLLM releases of this profile."""
    older: ClassVar[tuple[type[Connector], ...]] = ()
    sglang: ClassVar[type[Connector] | None] = None
    history: ClassVar[str] = ""
    """Releases with this class, for the error about others."""
    unread: ClassVar[Mapping[str, str]] = {}
    """Options that this profile's engine does not read → what to do instead. They are refused if set."""
    load_failure_policy_since: ClassVar[Release] = (0, 13)
    """First release with ``kv_load_failure_policy``."""

    @property
    def disaggregated(self) -> bool:
        return self.dispatch != "none"

    def profile(self, version: str = "", options: ConnectorOptions | None = None) -> Connector:
        """Return the profile for an engine version such as "0.13.0" or "sglang"; empty or newer than known:
        newest. Options may also select it. Raises InputError if the engine lacks this connector."""
        if not version or not self.kv_connector:
            return self
        if is_sglang(version):
            if self.sglang is None:
                raise InputError(
                    f"kvbench does not support {self.name} for SGLang", hint="mooncake and nixl are supported"
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
        """Why KV cannot move between these ranks, or "" if it can or is unknown."""
        return ""

    def options_problem(self, options: ConnectorOptions) -> str:
        """Name an option that this profile cannot apply, and what to do, or return ""."""
        for name, advice in self.unread.items():
            default = type(options).model_fields[name].get_default(call_default_factory=True)
            if getattr(options, name) != default:
                return f"{self.title} does not read the option {name}: {advice}"
        return ""

    def side_ports(self, role: str, ranks: Ranks) -> int:
        """Number of consecutive side ports of an instance."""
        if role not in self.side_port_roles:
            return 0
        if self.side_port_per_rank:
            return ranks.tensor * ranks.data
        return ranks.data if self.side_port_per_data_rank else 1

    def kv_transfer_config(
        self, role: Role, engine_id: str, options: ConnectorOptions, seat: Seat | None = None
    ) -> dict[str, Any] | None:
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
        """Environment of the engine process; the engine adds addresses per node."""
        return {}

    def seat_env(self, options: ConnectorOptions, seat: Seat) -> dict[str, str]:
        """Like ``env``, but with the instance's neighbours."""
        return self.env(seat.role, options, seat.side_port)

    def files(self, options: ConnectorOptions, seat: Seat) -> dict[str, dict[str, Any]]:
        """JSON files of an instance: environment variable for the path → content."""
        return {}

    def engine_args(self, role: Role, options: ConnectorOptions) -> dict[str, Any]:
        return {}

    def services(self, options: ConnectorOptions, host: str, ports: Sequence[int]) -> list[ProcessSpec]:
        """Helper processes that run before the engines, on ``service_ports`` planned ports."""
        return []

    def warnings(self, options: ConnectorOptions, env: Mapping[str, str]) -> list[str]:
        """User settings that this profile ignores or that harm."""
        return []

    def requested_transport(self, options: ConnectorOptions) -> str:
        """Requested transports, comma-separated; checked against the actual one."""
        return ""

    @abstractmethod
    def prefill_request(self, body: Body, request_id: str, peer: PrefillPeer) -> dict[str, Any]:
        """Body for P from a client's body."""

    @abstractmethod
    def decode_request(
        self, body: Body, prefill_response: Body | None, request_id: str, peer: PrefillPeer
    ) -> dict[str, Any]:
        """Body for D; ``prefill_response`` is None with concurrent dispatch."""

    def missing_in_prefill_response(self, prefill_response: Mapping[str, Any]) -> Sequence[str]:
        """Missing fields of P's response; any ends the request as an error."""
        return ()

    def backend_request_id(self, request_id: str, peer: PrefillPeer, decode_side_address: str) -> str:
        """``X-Request-Id`` for P and D."""
        return request_id


def one_token_prefill(
    body: Mapping[str, Any], kv_transfer_params: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Convert a client's body to P's: one token, not streamed, with handshake parameters if any.
    ``min_tokens`` and ``ignore_eos`` prevent an EOS on P, which would send no KV and leave D waiting."""
    request = {key: value for key, value in body.items() if key not in ("stream_options", "return_token_ids")}
    request.update(stream=False, max_tokens=1, min_tokens=1, ignore_eos=True)
    if "max_completion_tokens" in request:
        request["max_completion_tokens"] = 1
    if kv_transfer_params is not None:
        request["kv_transfer_params"] = dict(kv_transfer_params)
    return request


class _UnchangedOnD(Connector):
    """Sends a client's body to D unchanged."""

    def decode_request(
        self, body: Body, prefill_response: Body | None, request_id: str, peer: PrefillPeer
    ) -> dict[str, Any]:
        return dict(body)


class PlainConnector(_UnchangedOnD):
    """Sequential dispatch with unchanged bodies, except one token for P. P computes the prompt; D finds the
    KV by tokens or request id, without parameters (proxy_server.py of vLLM 0.6, and shared stores)."""

    dispatch = "sequential"

    def prefill_request(self, body: Body, request_id: str, peer: PrefillPeer) -> dict[str, Any]:
        return one_token_prefill(body)


class LoneConnector(_UnchangedOnD):
    """One server with a connector and no P/D; requests are unchanged."""

    dispatch = "none"

    def prefill_request(self, body: Body, request_id: str, peer: PrefillPeer) -> dict[str, Any]:
        raise NotImplementedError(f"{self.name} runs one server and has no prefill request")


class PullConnector(Connector):
    """Sequential dispatch that copies ``kv_transfer_params`` from P's response to D."""

    dispatch: DispatchMode = "sequential"
    side_port_roles: tuple[Role, ...] = ("prefill", "decode")
    answer_fields: ClassVar[tuple[str, ...]] = (
        "remote_block_ids",
        "remote_engine_id",
        "remote_host",
        "remote_port",
    )
    """Required fields of P's ``kv_transfer_params``, by which D finds the blocks."""

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
    """SGLang's hand-off: concurrent requests meet in a "room" on P's bootstrap server. The router adds
    ``bootstrap_host``, ``bootstrap_port`` and a random 63-bit ``bootstrap_room`` to both bodies (SGLang 0.5,
    sglang_router). Only P binds a bootstrap port. Untested: SGLang needs a GPU."""

    dispatch = "concurrent"
    side_port_roles: tuple[Role, ...] = ("prefill",)
    unread: ClassVar[Mapping[str, str]] = {
        "extra_config": "SGLang has no kv_connector_extra_config; give its own engine_args and env"
    }

    def prefill_request(self, body: Body, request_id: str, peer: PrefillPeer) -> dict[str, Any]:
        # P's own answer is discarded, so it need not be streamed.
        request = {key: value for key, value in body.items() if key != "stream_options"}
        return {**request, "stream": False, **room_of(request_id, peer)}

    def decode_request(
        self, body: Body, prefill_response: Body | None, request_id: str, peer: PrefillPeer
    ) -> dict[str, Any]:
        return {**body, **room_of(request_id, peer)}


def room_of(request_id: str, peer: PrefillPeer) -> dict[str, Any]:
    """Three fields that join a request on P and D; the room derives from the request id."""
    host, _, port = peer.side_address.rpartition(":")
    number = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "big") >> 1
    return {"bootstrap_host": host, "bootstrap_port": int(port or 0), "bootstrap_room": number}


TELLING: Final = {"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y"}
"""Log settings with lines at start-up and new connections only."""


class UcxOptions(KvOptions):
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
        description="UCX_TLS: transports for UCX; by default its own choice, for the emulated engine "
        "tcp. GPU memory requires cuda",
    )
    ucx_net_devices: str = Field("", description="UCX_NET_DEVICES: comma-separated devices, or all")
    num_threads: int | None = Field(
        None,
        ge=0,
        le=64,
        description="NIXL worker threads besides the progress thread; by default the engine's choice, "
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
    def requested_nics(self) -> tuple[str, ...]:
        return nic_names(self.ucx_net_devices)

    def nixl_config(self) -> dict[str, Any]:
        """Keys of vLLM's kv_connector_extra_config; without a thread count vLLM uses its default."""
        threads = {} if self.num_threads is None else {"num_threads": self.num_threads}
        return {"backends": list(self.backends), **threads}

    def env(self) -> dict[str, str]:
        """UCX's environment, with logging of its transports per connection and operation
        (transfer/parts/transport_lines.yaml). Unset, UCX chooses transports and devices. UCX_TLS without cuda
        would make NIXL 1.0 and newer refuse GPU memory."""
        wanted = {"UCX_TLS": self.ucx_tls, "UCX_NET_DEVICES": self.ucx_net_devices}
        return {**{name: value for name, value in wanted.items() if value}, **TELLING}


def moves_gpu_memory(tls: str) -> bool:
    """Whether UCX_TLS permits a transport for CUDA or ROCm memory."""
    words = [word.strip() for word in tls.removeprefix("^").split(",") if word.strip()]
    named = any(word == "all" or word.startswith(("cuda", "gdr", "rocm", "ze")) for word in words)
    return not words or named != tls.startswith("^")


def ucx_warnings(options: ConnectorOptions, env: Mapping[str, str]) -> list[str]:
    """User options and environment that are ignored."""
    assert isinstance(options, UcxOptions)
    found = []
    if "UCX" not in options.backends and (options.ucx_tls or options.ucx_net_devices):
        found.append("ucx_tls and ucx_net_devices do nothing, since UCX is not among the backends")
    for name in ("MOONCAKE_PROTOCOL", "MOONCAKE_DEVICE"):
        if name in env:
            found.append(f"{name} is set, but NIXL never reads it")
    return found
