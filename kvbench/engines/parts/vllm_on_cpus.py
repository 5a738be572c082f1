"""vLLM on CPUs: whether it is, and what a release has to be told there to compute what the model says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from kvbench.connectors.base import Role
from kvbench.core.engine_versions import Releases, release
from kvbench.engines.parts.vllm_options import VllmOptions

WRONG_NORM: Final = Releases((0, 12), (0, 14))
"""Where vLLM's own ``rms_norm`` for CPUs takes slices of QKV, which Qwen3 and others normalize by head, for
contiguous, so that every step of more than one token is computed wrong: 0.12 gave up the copy before it
(vllm-project/vllm#28103), 0.14 the kernel (#31643); measured with 0.13.0. Compiled models do without it."""
NATIVE_NORM: Final = "-rms_norm"
"""In ``custom_ops``: PyTorch's operations instead."""


def on_cpu(options: VllmOptions, version: str) -> bool:
    """Whether this vLLM is one for CPUs; ``version`` is empty if it is not known."""
    return "+cpu" in version or any(name.startswith("VLLM_CPU_") for name in options.env)


def cpu_args(options: VllmOptions, version: str) -> dict[str, Any]:
    """Arguments that a release needs on CPUs; the user's own win over them."""
    if not on_cpu(options, version) or release(version) not in WRONG_NORM:
        return {}
    return {"compilation-config": {"custom_ops": [NATIVE_NORM]}}


def cpu_warnings(options: VllmOptions, version: str, roles: Sequence[Role]) -> Iterator[str]:
    """Where the user's own arguments take that away."""
    for name in cpu_args(options, version) if version else ():
        given = [str(options.arguments(role).get(name, NATIVE_NORM)) for role in roles]
        if not all(NATIVE_NORM in words or "none" in words for words in given):
            yield (
                f"vLLM {version} computes prompts wrong on CPUs with its own rms_norm: add {NATIVE_NORM} to "
                f"custom_ops of {name}, or leave that argument to kvbench"
            )
