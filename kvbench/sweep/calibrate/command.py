"""``kvbench calibrate --from``: a timing profile of what was measured, checked on a part held out of it."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from kvbench.core.calibration.fit import FittedTiming, ServedLoad
from kvbench.core.calibration.held_out import CheckedFit, checked_fit, later_part
from kvbench.core.calibration.profile_file import (
    Coefficient,
    Covariance,
    FittedTo,
    ProfileFile,
    profile_text,
)
from kvbench.core.fitted_table import Grid, columns_of
from kvbench.errors import EXIT_FAILED, EXIT_OK, InputError
from kvbench.files import write_bytes
from kvbench.sweep.calibrate.served_inputs import CalibrationInput, EngineLimits, read_inputs

_DIGITS: Final = 6
_SHOWN: Final = 8
"""Most lines on what a profile cannot explain that are printed."""
_COVARIANCE_DIGITS: Final = 12
"""Coefficients that are hardly told apart have a covariance that fewer would make impossible."""


@dataclass(frozen=True)
class CalibrateOptions:
    """What the command line asks for. ``held_out``: the share of each load's last requests not fitted to."""

    sources: Sequence[Path]
    output: Path
    name: str = ""
    engine: str = ""
    machine: str = ""
    held_out: float = 1 / 3
    limits: EngineLimits = field(default_factory=EngineLimits)


def command(options: CalibrateOptions, console: Console) -> int:
    """Fit, check, write, print; 0 for a profile that is fit, 1 for one that is not. Raises InputError."""
    if options.output.exists():
        raise InputError(f"{options.output} is there already", hint="give another --output, or remove it")
    profile = calibrated(options)
    write_bytes(options.output, profile_text(profile).encode())
    _print(profile, options.output, console)
    return EXIT_OK if profile.status == "fit" else EXIT_FAILED


def calibrated(options: CalibrateOptions) -> ProfileFile:
    """The profile of what was measured. Raises InputError where that is too little."""
    given = read_inputs(options.sources, options.limits)
    used, by = _split(given.loads, options.held_out)
    checked = checked_fit(given.loads, used, by)
    return _profile(given, checked, options)


def _split(loads: Sequence[ServedLoad], share: float) -> tuple[list[NDArray[np.bool_]], str]:
    """The requests to fit to: those of all lengths but the middle one, or the earlier ones of each load."""
    lengths = [float(np.median(each.input_len)) for each in loads]
    alike = all(np.ptp(each.input_len) <= 0.1 * length for each, length in zip(loads, lengths, strict=True))
    known = sorted(set(np.round(lengths, -1).tolist()))
    if not alike or len(known) < 3:
        return later_part(loads, share), f"the last {share:.0%} of each load"
    middle = known[len(known) // 2]
    masks: list[NDArray[np.bool_]] = [
        np.full(len(each.load.offsets_s), round(length, -1) != middle)
        for each, length in zip(loads, lengths, strict=True)
    ]
    return masks, f"the prompts of {middle:g} tokens"


def _profile(given: CalibrationInput, checked: CheckedFit, options: CalibrateOptions) -> ProfileFile:
    fitted = checked.fitted
    inputs = np.concatenate([each.input_len for each in given.loads])
    outputs = np.concatenate([each.output_len for each in given.loads])
    notes = "".join(f"; {note}" for note in dict.fromkeys(given.notes))
    engine = options.engine or given.engine or "not recorded"
    return ProfileFile(
        version=1,
        name=options.name or re.sub(r"[^A-Za-z0-9._-]+", "-", options.output.stem).lstrip("._-") or "profile",
        source=f"kvbench calibrate, fitted to {', '.join(given.inputs)}{notes}"[:2000],
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        engine=engine[:200],
        machine=(options.machine or given.machine or "not recorded")[:500],
        scenario_sha256=given.scenario_sha256,
        tensor_parallel_size=given.tensor_parallel_size,
        num_kv_tokens=given.num_kv_tokens,
        status="fit" if checked.holds else "unfit",
        cannot_explain=checked.cannot_explain[:64],
        fitted_to=FittedTo(
            requests=fitted.requests,
            inputs=given.inputs[:64],
            input_len=[int(inputs.min()), int(inputs.max())],
            output_len=[int(outputs.min()), int(outputs.max())],
        ),
        held_out=checked.held_out,
        coefficients=_coefficients(fitted),
        covariance=Covariance(
            order=list(fitted.values),
            rows=[[_rounded(cell, _COVARIANCE_DIGITS) for cell in row] for row in fitted.covariance.tolist()],
        ),
    )


def _coefficients(fitted: FittedTiming) -> dict[str, Coefficient]:
    errors = fitted.errors
    return {
        name: Coefficient(value=_rounded(value), error=_rounded(errors[name]))
        for name, value in fitted.values.items()
    }


def _rounded(value: float, digits: int = _DIGITS) -> float:
    return float(f"{value:.{digits}g}")


def _print(profile: ProfileFile, path: Path, console: Console) -> None:
    rows = [
        [name, f"{each.value:.4g}", f"{each.error:.2g}" if each.error is not None else "–"]
        for name, each in profile.coefficients.items()
    ]
    table = Grid(columns_of("coefficient", "value ms|± error"), rows)
    fitted = table.fitted(console.width if console.is_terminal else None)
    console.print(fitted.text(), markup=False, highlight=False, soft_wrap=True)
    held = profile.held_out
    assert held is not None
    words = ", ".join(
        f"{name} {each.ratio:.3f} of measured (stated within {each.stated:.0%})"
        for name, each in held.figures.items()
    )
    more = len(profile.cannot_explain) - _SHOWN
    lines = [
        "",
        f"held out: {held.by}, {held.requests} requests: predicted {words}",
        *(f"cannot explain: {each}" for each in profile.cannot_explain[:_SHOWN]),
        *([f"and {more} more: cannot_explain in the file"] if more > 0 else []),
        f"{path}: {profile.status.upper()}",
    ]
    console.print("\n".join(lines), markup=False, highlight=False)
    if console.stderr:  # a program reads stdout
        sys.stdout.write(profile.model_dump_json(indent=2, exclude_none=True) + "\n")
