"""``python -m kvbench.processes.emulator SPEC.json``: exit code 0 after SIGTERM, 2 bad spec, 98 busy port."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Final

import uvloop

from kvbench.core.plan.processes import EMULATOR_MODULE
from kvbench.errors import InputError, KvbenchError, PortInUseError
from kvbench.processes.common.entry import raise_open_files, shorten_slice
from kvbench.processes.emulator.lies import plant
from kvbench.processes.emulator.server import EngineServer, serve
from kvbench.processes.emulator.spec import EngineSpec, parse_spec

EXIT_PORT_IN_USE: Final = 98


async def engine(spec: EngineSpec) -> None:
    """Return an engine, with its spec's planted fault if any, from start to stop."""
    server = EngineServer(spec)
    plant(server)
    await serve(server)


def main(argv: list[str]) -> int:
    shorten_slice()
    raise_open_files()
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if len(argv) != 1:
        print(f"usage: python -m {EMULATOR_MODULE} SPEC.json", file=sys.stderr)
        return InputError.exit_code
    try:
        spec = parse_spec(Path(argv[0]).read_bytes(), argv[0])
        uvloop.run(engine(spec))
    except PortInUseError as error:
        print(error.message, file=sys.stderr)
        return EXIT_PORT_IN_USE
    except KvbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return InputError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
