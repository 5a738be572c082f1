"""``python -m tools.gpu.one NAME RESULT FOLDER``: one check; its result is written to the file RESULT."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, Final

from kvbench.errors import KvbenchError
from tools.gpu import driver
from tools.gpu.checks import CHECKS
from tools.gpu.result import Check, CheckFailedError, SkippedError

NO_DRIVER: Final = "no NVIDIA driver here"


def answer_of(check: Check, folder: Path) -> dict[str, Any]:
    try:
        if check.gpu and not driver.there():
            raise SkippedError(NO_DRIVER)
        return {"status": "ok", "figures": dict(check.run(folder)), "text": ""}
    except SkippedError as reason:
        return {"status": "skipped", "figures": {}, "text": str(reason)}
    except CheckFailedError as error:
        return {"status": "failed", "figures": error.figures, "text": str(error)}
    except KvbenchError as error:
        return {"status": "failed", "figures": {}, "text": f"{error}"}
    except Exception as error:
        lines = {"traceback": traceback.format_exc().splitlines()[-8:]}
        return {"status": "failed", "figures": lines, "text": f"{type(error).__name__}: {error}"}


def main(argv: list[str]) -> None:
    name, result, folder = argv
    check = next(entry for entry in CHECKS if entry.name == name)
    path = Path(result)
    path.with_suffix(".part").write_text(json.dumps(answer_of(check, Path(folder)), default=str))
    path.with_suffix(".part").rename(path)
    sys.stdout.flush()
    os._exit(0)  # not by way of native libraries' destructors, which may hang


if __name__ == "__main__":
    main(sys.argv[1:])
