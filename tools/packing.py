"""What the build adds to setuptools: the bundled scenarios go into the package, as ``kvbench/scenarios``.

As a package of its own in pyproject.toml, lying elsewhere, they would cost every start of Python 12 ms in an
editable installation, which finds it through an import hook then, and not through a mere path.
"""

import shutil
from pathlib import Path

from setuptools.command.build_py import build_py


class BuildWithScenarios(build_py):  # type: ignore[misc]
    """Nothing is copied for an editable installation, which finds them in the checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "kvbench" / "scenarios"
            shutil.copytree("scenarios", target, dirs_exist_ok=True)
