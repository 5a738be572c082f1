"""Why a host's agent is of no use, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvbench.core.plan.processes import AGENT_MODULE
from kvbench.errors import LaunchError
from kvbench.launchers.agents.wire import PROTOCOL
from kvbench.version import __version__


def another_version(host: str, hello: Mapping[str, Any]) -> LaunchError:
    """The error for an agent of another kvbench, or of another protocol."""
    return LaunchError(
        f"{host} has kvbench {hello.get('version')} (protocol {hello.get('protocol')}), and here it is "
        f"{__version__} (protocol {PROTOCOL})",
        hint="all hosts need the same: kvbench hosts install SCENARIO",
    )


def no_agent(host: str, why: str, words: list[str]) -> LaunchError:
    """The error for an agent that did not come up, with what to do about the usual reasons."""
    said = " | ".join([why, *words[-3:]])
    hint = f"try it by hand: ssh {host} PYTHON -m {AGENT_MODULE}"
    if re.search(r"No module named '?kvbench\.", said):  # a kvbench that has no such module
        said = f"another kvbench is installed there, and here it is {__version__} ({why})"
        hint = f"install kvbench {__version__} there: kvbench hosts install SCENARIO"
    elif "No module named" in said and "kvbench" in said:
        said = f"kvbench is not installed there ({why})"
        hint = (
            "kvbench hosts install SCENARIO does it; by hand: copy the wheel there, then "
            "python3 -m venv WORKDIR/venv && WORKDIR/venv/bin/pip install kvbench-*.whl"
        )
    elif "not found" in said or "No such file" in said:
        hint = (
            "set deployment.hosts.NAME.python to a Python there that has kvbench; or: kvbench hosts install"
        )
    return LaunchError(f"no agent came up on {host}: {said}", hint=hint)
