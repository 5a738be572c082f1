"""Timing profiles by name or file: the model's, bundled and user files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvbench.core.simulation.step_time import PROFILE_NAMES, TimingProfile, timing_profile
from kvbench.errors import InputError

if TYPE_CHECKING:  # it imports numpy, which takes 0.1 s
    from kvbench.core.calibration.profile_file import ProfileFile

BUNDLED: Final = Path(__file__).with_name("timing_profiles")
_LONGEST: Final = 256 * 1024


def bundled_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in BUNDLED.glob("*.yaml")))


def profile_file(choice: str) -> ProfileFile | None:
    """Profile file of ``simulate.timing``; None for a profile of ``core.simulation.step_time``. Raises
    InputError for an unknown name, or a file with all its mistakes."""
    if choice in PROFILE_NAMES:
        return None
    if choice in bundled_names():
        return read_profile(BUNDLED / f"{choice}.yaml")
    if "/" in choice or choice.endswith((".yaml", ".yml")):
        return read_profile(Path(choice).expanduser())
    raise InputError(
        f"unknown timing profile {choice!r}",
        hint=f"there are: {', '.join((*PROFILE_NAMES, *bundled_names()))}; or name a file: ./{choice}.yaml",
    )


def read_profile(path: Path) -> ProfileFile:
    from kvbench.core.calibration.profile_file import parse_profile

    hint = "simulate.timing and engine_options.timing take a name or a profile file of `kvbench calibrate`"
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"the timing profile {path} is a folder, a pipe or a device", hint=hint)
        with path.open("rb") as file:
            text = file.read(_LONGEST + 1)
    except OSError as error:
        raise InputError(
            f"the timing profile {path} cannot be read: {error.strerror or error}", hint=hint
        ) from None
    if len(text) > _LONGEST:
        raise InputError(f"{path} is longer than {_LONGEST >> 10} KiB and no timing profile", hint=hint)
    return parse_profile(text.decode("utf-8", "replace"), str(path))


def timing_of_choice(choice: str, tensor_parallel_size: int = 1) -> TimingProfile:
    """Step times of a name or file. Raises InputError as ``profile_file``."""
    found = profile_file(choice)
    return (
        timing_profile(choice, tensor_parallel_size) if found is None else found.timing(tensor_parallel_size)
    )
