"""Find, read and check scenario files, by path or bundled name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from kvbench import connectors, engines
from kvbench.core.scenario.overrides import typed_overrides
from kvbench.core.scenario.scenario import Draft, Registry, Scenario, read_scenario
from kvbench.core.scenario.yaml_lines import MAX_CHARS
from kvbench.errors import InputError, ScenarioError
from kvbench.files import similar_files

Model = TypeVar("Model")


class _OnDemand(Mapping[str, Model]):
    """Option models by name. A model's module is imported when it is looked up: a scenario names few."""

    def __init__(self, names: Sequence[str], model_of: Callable[[str], Model]) -> None:
        self._names, self._model_of = names, model_of

    def __getitem__(self, name: str) -> Model:
        if name not in self._names:
            raise KeyError(name)
        return self._model_of(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def registry() -> Registry:
    """Options of all installed connectors and engines."""
    return Registry(
        connectors=_OnDemand(connectors.names(), lambda name: connectors.get(name).options_model),
        engines=_OnDemand(engines.names(), engines.options_model),
    )


def plain_name(text: str) -> str:
    """Model or scenario name from a text: its last part, letters only."""
    last = text.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).lstrip("._-")[:64] or "model"


def bundled_folder() -> Path:
    """Folder of bundled scenarios: inside an installed package, or next to it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "scenarios"
    return installed if installed.is_dir() else package.parent / "scenarios"


def bundled_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in bundled_folder().glob("*.yaml")))


def find_scenario(name_or_path: str) -> tuple[bytes, str]:
    """Return a scenario's bytes and source. A name with a slash or YAML suffix is a path; others are bundled
    names, then files in the current folder. Raises InputError with similar names."""
    is_path = "/" in name_or_path or name_or_path.endswith((".yaml", ".yml"))
    bundled = name_or_path.removesuffix(".yaml")
    path = Path(name_or_path)
    try:
        if bundled in bundled_names() and not (is_path and path.exists()):
            path = bundled_folder() / f"{bundled}.yaml"
        if path.is_file():
            return _read(path), str(path)
        if path.exists():
            kind = "folder" if path.is_dir() else "special file"
            raise InputError(f"{path} is a {kind}, not a scenario file", hint=_available(name_or_path))
    except (ValueError, OSError) as error:
        # A name with a null byte, far too long, or in a folder that may not be entered.
        raise InputError(f"{name_or_path[:80]!r} cannot be opened: {error}", hint=_available("")) from error
    what = f"there is no file {name_or_path!r}" if is_path else f"unknown scenario {name_or_path!r}"
    raise InputError(what, hint=_available(name_or_path))


def load_draft(name_or_path: str) -> tuple[Draft, bytes]:
    """Return an unchecked scenario and its file's bytes. Raises InputError or ScenarioError."""
    data, origin = find_scenario(name_or_path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ScenarioError(
            f"{origin}:{line}: is not UTF-8 text: byte 0x{data[error.start]:02x}",
            hint="save the file as UTF-8",
        ) from error
    return read_scenario(text, origin), data


def load_scenario(
    name_or_path: str, overrides: Sequence[str] = (), known: Registry | None = None
) -> tuple[Scenario, bytes]:
    """Return a checked scenario and its file's bytes. Raises InputError or ScenarioError."""
    draft, data = load_draft(name_or_path)
    return draft.put(typed_overrides(overrides)).checked(known or registry()), data


def _read(path: Path) -> bytes:
    limit = 4 * MAX_CHARS  # a character takes at most four bytes; the parser counts characters
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > limit:
        raise InputError(f"{path} is longer than {limit // 1024} KiB, too long for a scenario")
    return data


def _available(wanted: str) -> str:
    names = bundled_names()
    similar = similar_files(Path(wanted.replace("\0", "") or "-"), *names)
    return f"{similar}bundled scenarios: {', '.join(names) or 'none'}; or give the path of a .yaml file"
