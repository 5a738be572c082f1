"""Temporary folders go with their maker, or are found once it is dead."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from commands import kvbench

from kvbench.files import MARKER, keep, left, scratch

MAKING = """
import sys, time
from kvbench.files import scratch
with scratch("kvbench-abc123-", "a-run") as folder:
    (folder / "specs").mkdir()
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_goes_with_its_block(temporary: Path) -> None:
    with scratch("kvbench-x-") as folder:
        (folder / "a").write_text("b")
        assert list(left()) == []
    with pytest.raises(ValueError, match="z"), scratch("kvbench-x-"):
        raise ValueError("z")
    assert list(temporary.iterdir()) == []


def test_it_stays_where_it_is_kept(temporary: Path) -> None:
    with pytest.raises(ValueError, match="z"), scratch("kvbench-x-", kept_after_trouble=True):
        raise ValueError("z")
    with scratch("kvbench-y-") as folder:
        keep(folder)
    assert len(list(temporary.iterdir())) == 2
    assert list(left()) == []


def test_stop_removes_those_of_dead_runs_and_no_others(temporary: Path) -> None:
    for name in ("kvbench-results", "kvbench-linked", "other"):
        (temporary / name).mkdir()
    (temporary / "kvbench-linked" / MARKER).symlink_to(temporary / "other")
    (temporary / "kvbench-link").symlink_to(temporary / "kvbench-results")
    made = []
    with scratch("kvbench-alive-", "a-run") as alive:
        for _ in range(2):
            with subprocess.Popen([sys.executable, "-c", MAKING], stdout=subprocess.PIPE, text=True) as maker:
                made.append(Path(maker.stdout.readline().strip()))
                assert list(left()) == [(folder, "a-run") for folder in sorted(made[:-1])]
                maker.kill()
        environment = {**os.environ, "TMPDIR": str(temporary)}
        assert kvbench("stop", "--run", "another", env=environment).status == 0
        assert all(folder.is_dir() for folder in made)
        assert kvbench("stop", "--run", "a-run", env=environment).out.count(" removed") == 2
        assert not any(folder.exists() for folder in made)
        assert alive.is_dir()
    left_there = sorted(path.name for path in temporary.iterdir())
    assert left_there == ["kvbench-link", "kvbench-linked", "kvbench-results", "other"]
