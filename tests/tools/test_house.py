"""The limits on sizes and names: each is found when it is overstepped, and an excuse must have a need."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.house import HOUSE, ROOT, Limits, problems

LIMITS = Limits(top_entries=3, folder_files=2, module_lines=6, function_lines=3)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Two modules, a room with two, and what is not counted."""
    root = tmp_path / "house"
    files = {
        "__init__.py": "",
        "py.typed": "",
        "first.py": "class Site:\n    x = 1\n",
        "second.py": "def f() -> None:\n    return None\n",
        "room/__init__.py": "",
        "room/third.py": "class Bench:\n    y = 1\n",
        "room/fourth.py": "",
        "room/_fast.so": "",
        "room/__pycache__/third.pyc": "",
        "room/__pycache__/fourth.pyc": "",
        "room/__pycache__/fifth.pyc": "",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def found(package: Path, **changed: object) -> list[str]:
    return list(problems(package, Limits(**{**vars(LIMITS), **changed})))  # type: ignore[arg-type]


def test_a_small_house_is_in_order(package: Path) -> None:
    assert found(package) == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("more.py", "", "house/ has 4 entries, not 3 at most"),
        ("room/fifth.py", "", "room/ has 3 files, not 2: give it a door, or a reason"),
        ("first.py", "x = 1\n" * 7, "house/first.py has 7 lines, not 6 at most"),
        (
            "first.py",
            "def f() -> int:\n    a = 1\n    b = 2\n    return a + b\n",
            "house/first.py:1: f has 4 lines, not 3 at most",
        ),
        (
            "room/fourth.py",
            "class Site:\n    z = 1\n",
            "Site is a name of 2 things: house/first.py, house/room/fourth.py",
        ),
        ("room/first.py", "", "first.py is a name of 2 things: house/first.py, house/room/first.py"),
    ],
)
def test_what_is_too_large_is_named(package: Path, name: str, text: str, message: str) -> None:
    (package / name).write_text(text)
    assert message in found(package)


def test_an_excuse_lets_pass_and_must_be_needed(package: Path) -> None:
    (package / "room/fifth.py").write_text("")
    (package / "room/first.py").write_text("")
    excused = {"large_folders": {"room": "so it is"}, "same_names": ["first.py"]}
    assert found(package, **excused) == []
    (package / "room/fifth.py").unlink()
    (package / "room/first.py").unlink()
    assert found(package, **excused) == [
        "tools/house.py excuses room/, which needs no excuse",
        "tools/house.py excuses the name first.py, which needs no excuse",
    ]


def test_kvbench_keeps_its_own_limits() -> None:
    assert (HOUSE.top_entries, HOUSE.folder_files) == (21, 20)
    assert (HOUSE.module_lines, HOUSE.function_lines) == (500, 60)
    assert list(problems(ROOT / "kvbench", HOUSE)) == []
