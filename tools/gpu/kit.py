"""``make gpu-kit``: one archive with all that ``make test-gpu`` needs on a machine without a network.

In it: the project's files that git knows, as they are here; packages for that machine's Python, NIXL's and
Mooncake's without what the checks never load; libibverbs and friends from Debian. Torch with numpy, CUDA's
runtime and NCCL, pandas and pyarrow are the machine's own. There: ``tar xzf gpu-kit.tar.gz && gpu-kit/run``.
The archive lies in dist/, which git ignores; one above 60 MB is refused.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from zipfile import ZipFile

from tools.bench import ROOT, arguments, output_of

NAME: Final = "gpu-kit"
LIMIT_BYTES: Final = 60_000_000
PIP_DEADLINE_S: Final = 900.0
APT_DEADLINE_S: Final = 120.0
GLIBC_MINORS: Final = (17, 24, 27, 28, 31, 34, 35)
PROJECT: Final = ("kvbench", "tools", "scenarios", "pyproject.toml", "LICENSE", "Makefile")

DROPPED: Final = (
    # NIXL: expert-parallel kernels, and all plugins but UCX's; etcd, S3, Azure and their like serve those.
    *("nixl_ep_cu1?/*", "*.scripts/*", "*/libplugin_[!U]*", "*/libucx_perftest*", "*libaws*", "*libazure*"),
    *("*libxml2*", "*libs2n*", "*libgusli*", "*/libnixl_test*", "*/libnixl_capi*", "*/libobj_utils*"),
    # Mooncake: the store, its servers, expert parallelism; the engine alone is loaded.
    *(
        *("mooncake/_store*", "mooncake/mooncake_*", "mooncake/libmooncake_*"),
        *("mooncake/_ep*", "mooncake/_pg_jit/*"),
    ),
    *("mooncake/transfer_engine_bench", "mooncake_transfer_engine*.libs/libetcd_wrapper*", "*/tests/*"),
)
"""Of the wheels; tried on each file's path in its wheel."""


@dataclass(frozen=True)
class Group:
    """Packages that go together: into the path only where the machine lacks ``probe``."""

    probe: str
    packages: tuple[str, ...]


def groups(cuda: int) -> tuple[Group, ...]:
    """What the checks import beyond what a machine with torch always has."""
    mooncake = "mooncake-transfer-engine-cuda13" if cuda >= 13 else "mooncake-transfer-engine"
    pydantic = ("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions")
    return (
        Group(f"nixl_cu{cuda}", (f"nixl-cu{cuda}",)),
        Group("mooncake", (mooncake,)),
        Group("pydantic", pydantic),
        Group("rich", ("rich", "markdown-it-py", "mdurl", "pygments")),
        Group("typer", ("typer", "click", "shellingham", "annotated-doc", "typing-extensions")),
        Group(
            "httpx", ("httpx", "httpcore", "h11", "anyio", "sniffio", "idna", "certifi", "typing-extensions")
        ),
        Group("jinja2", ("jinja2", "markupsafe")),
        *(Group(name, (name,)) for name in ("httptools", "uvloop", "psutil", "prometheus_client")),
        Group("yaml", ("pyyaml",)),
    )


LIBRARIES: Final = ("libibverbs1", "libnl-3-200", "libnl-route-3-200", "libnuma1", "ibverbs-providers")
"""Debian packages, of which the shared libraries are taken; what the machine lacks of them is used there."""


class KitError(Exception):
    """The archive cannot be made; why."""


def run(words: Sequence[str], deadline_s: float, folder: Path = ROOT) -> str:
    output: str
    status, output = output_of(words, deadline_s, folder)
    if status:
        raise KitError(f"{' '.join(words[:6])} … failed:\n{output[-1500:]}")
    return output


def project(target: Path) -> None:
    for name in run(["git", "ls-files", "--", *PROJECT], 60.0).splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def wheels(group: Group, python: str, cache: Path) -> list[Path]:
    """The wheels of a group for that Python, downloaded once. Raises KitError."""
    folder = cache / f"{python}-{'-'.join(group.packages)}"
    if not (found := sorted(folder.glob("*.whl"))):
        # Pinned, since pydantic loads with one version of its core alone.
        lines = [line.split(";")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
        pins = {line.partition("==")[0].replace("_", "-"): line for line in lines if "==" in line}
        platforms = [word for n in GLIBC_MINORS for word in ("--platform", f"manylinux_2_{n}_x86_64")]
        run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms),
                *("--platform", "manylinux2014_x86_64", "--platform", "manylinux1_x86_64"),
                *("--dest", str(folder), *(pins.get(name, name) for name in group.packages)),
            ],
            PIP_DEADLINE_S,
        )
        found = sorted(folder.glob("*.whl"))
    return found


def unpack(wheel: Path, target: Path) -> None:
    with ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.endswith("/") and not any(fnmatch.fnmatch(name, pattern) for pattern in DROPPED):
                archive.extract(name, target)


def libraries(target: Path, cache: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    target.mkdir(parents=True, exist_ok=True)
    if not list(cache.glob("*.deb")):
        run(["apt-get", "-o", "APT::Sandbox::User=root", "download", *LIBRARIES], APT_DEADLINE_S, cache)
    unpacked = cache / "unpacked"
    for package in sorted(cache.glob("*.deb")):
        run(["dpkg-deb", "-x", str(package), str(unpacked)], 60.0)
    for path in sorted(unpacked.rglob("*.so*")):
        if not path.is_symlink():
            # libnuma.so.1.0.0 is loaded as libnuma.so.1; a plugin by its whole name.
            stem, _, number = path.name.partition(".so.")
            shutil.copy2(path, target / (f"{stem}.so.{number.split('.')[0]}" if number else path.name))


def archive(folder: Path, out: Path) -> int:
    out.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out, "w:gz", compresslevel=9) as tar:
        tar.add(folder, arcname=NAME)
    if (size := out.stat().st_size) > LIMIT_BYTES:
        raise KitError(f"{out} has {size / 1e6:.1f} MB, more than {LIMIT_BYTES / 1e6:.0f}")
    return size


def make(python: str, cuda: int, out: Path, cache: Path) -> int:
    folder = cache / NAME
    shutil.rmtree(folder, ignore_errors=True)
    project(folder)
    for group in groups(cuda):
        for wheel in wheels(group, python, cache):
            unpack(wheel, folder / "site" / group.probe)
    libraries(folder / "native", cache / "debian")
    # Mooncake's engine gets NIXL's copy of libcurl, which needs OpenSSL 3 alone, not a dozen packages.
    nixl = folder / "site" / f"nixl_cu{cuda}"
    for path in (*nixl.rglob("libcurl-*.so*"), *nixl.rglob("libzstd-*.so*")):
        name = "libcurl.so.4" if path.name.startswith("libcurl") else path.name
        shutil.copy2(path, folder / "native" / name)
    start = folder / "run"
    start.write_text(
        '#!/bin/sh\ncd "$(dirname "$0")" && exec "${PYTHON:-python3}" -m tools.gpu.start . "$@"\n'
    )
    start.chmod(0o755)
    for entry in sorted((folder / "site").iterdir()):
        nbytes = sum(path.stat().st_size for path in entry.rglob("*") if path.is_file())
        print(f"  {entry.name}: {nbytes / 1e6:.1f} MB unpacked")
    return archive(folder, out)


def main() -> int:
    given = arguments(
        "Makes the archive for a machine with a GPU and no network.",
        python=("3.12", "that machine's Python"),
        cuda=(13, "that machine's CUDA, 12 or 13"),
        out=(ROOT / "dist" / f"{NAME}.tar.gz", "the archive"),
    )
    os.umask(0o022)
    try:
        size = make(given.python, given.cuda, given.out, ROOT / "build" / NAME)
    except KitError as error:
        print(f"gpu-kit: {error}", file=sys.stderr)
        return 1
    print(f"{given.out}: {size / 1e6:.1f} MB, for Python {given.python} and CUDA {given.cuda}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
