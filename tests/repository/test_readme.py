"""The README speaks of what is there: commands, files that exist, and no machine of ours."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import pytest

from kvbench.planning.scenario_files import bundled_names
from tools import commands_page

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_page_of_commands_is_as_it_is_generated() -> None:
    assert commands_page.PAGE.read_text() == commands_page.page(), "run python -m tools.commands_page"


@pytest.mark.parametrize(
    "page", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
)
def test_links_and_pictures_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text()):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), target


def test_each_page_is_found_from_the_index_and_the_index_from_the_readme() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert "](docs/README.md)" in README
    for path in (ROOT / "docs").glob("*.md"):
        assert path.name == "README.md" or f"]({path.name})" in index


def test_the_readme_and_the_pages_are_short() -> None:
    assert len(README.splitlines()) <= 180
    for path in (ROOT / "docs").glob("*.md"):
        assert len(path.read_text().splitlines()) <= 250, path.name


def test_scenarios_named_in_examples_exist() -> None:
    for name in re.findall(r"kvbench (?:sweep|plan|launch) ([a-z0-9][a-z0-9.-]*)(?: |$|`)", README):
        assert name in bundled_names() or name in ("my-scenario.yaml", "two-nodes.yaml"), name


def _strangers() -> re.Pattern[str]:
    """This checkout's own path, and the hosts of the package registries that this machine is set to."""
    told = [value for name, value in os.environ.items() if "INDEX" in name and "://" in value]
    for place in ("/etc/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf"):
        with contextlib.suppress(OSError):
            told.append(Path(place).expanduser().read_text())
    hosts = set(re.findall(r"https?://(?:[^/@\s]*@)?([^/:\s]+)", "\n".join(told))) - {
        "localhost",
        "127.0.0.1",
    }
    urls = [rf"://(?:[^/@\s]*@)?{re.escape(host)}" for host in sorted(hosts)]
    return re.compile("|".join(rf"{each}(?![\w-])" for each in (re.escape(str(ROOT)), *urls)))


def test_no_file_names_this_machine_or_its_registries() -> None:
    strangers = _strangers()
    for folder in ("kvbench", "scenarios", "tools", "notebooks", "docs", "results/reference", "."):
        for path in (ROOT / folder).glob("*" if folder == "." else "**/*"):
            if path.is_file() and path.suffix in (
                ".py",
                ".md",
                ".yaml",
                ".toml",
                ".txt",
                ".ipynb",
                ".json",
                "",
            ):
                found = strangers.search(path.read_text(errors="replace"))
                assert not found, f"{path}: {found}"
