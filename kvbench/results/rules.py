"""The version of the rules that judge a run: verdicts, findings, limits, and answers from trials."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

RULES_VERSION: Final = 1
"""Version of the rules in ``core`` and ``sweep``.

Raise it by one when the same stored requests can get another verdict, reason, finding or limit, or the same
trials another answer. Renaming, comments and faster code leave it. ``tests/sweep/test_verify.py`` judges the
reference runs: one that has this version must be sound.
"""
UNVERSIONED: Final = 0
"""Version of the rules of runs that were measured before rules had one."""


def rules_version_of(manifest: Mapping[str, Any]) -> int:
    """Return the version of the rules that judged a run; of several the first that is not today's."""
    versions = [_version(each.get("rules_version")) for each in manifest.get("sessions") or [{}]]
    return next((version for version in versions if version != RULES_VERSION), RULES_VERSION)


def _version(stored: Any) -> int:
    return stored if isinstance(stored, int) and not isinstance(stored, bool) else UNVERSIONED
