"""P's bootstrap address (HTTP, ``GET /query``), where D learns the address of P's side channel."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

from kvbench.errors import InputError, KvbenchError, TransferError
from kvbench.processes import http1


def answer_query(
    request: http1.ReceivedRequest, response: http1.Response, engine_id: str, worker: str
) -> None:
    """P: the engine and its side channel's URL."""
    if request.method != "GET" or request.path != "/query":
        response.send(404, http1.error_body(404, "the bootstrap server answers GET /query"))
        return
    answer = {"0": {"engine_id": engine_id, "worker_addr": {"0": {"0": worker}}}}
    response.send(200, json.dumps(answer).encode())


async def worker_address(bootstrap: str, engine_id: str, timeout_s: float) -> tuple[str, int]:
    """Asks P's bootstrap server for the side channel of the named engine. Raises TransferError."""
    try:
        pool = http1.Pool(bootstrap, connect_timeout_s=timeout_s)
    except InputError as error:
        raise TransferError(f"remote_bootstrap_addr: {error.message}") from None
    try:
        reply = await asyncio.wait_for(http1.fetch(pool, pool.request("GET", "/query")), timeout_s)
        found: dict[str, str] = {
            str(rank["engine_id"]): rank["worker_addr"]["0"]["0"] for rank in reply.json().values()
        }
    except asyncio.TimeoutError:
        raise TransferError(f"no answer from the bootstrap server {bootstrap}") from None
    except (OSError, KvbenchError) as error:
        raise TransferError(f"cannot reach the bootstrap server {bootstrap}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TransferError(f"{bootstrap} is no bootstrap server: {error!r}") from None
    finally:
        await pool.close()
    address = urlsplit(found.get(engine_id, ""))
    if not address.hostname or not address.port:
        raise TransferError(f"{bootstrap} serves engine {', '.join(found) or 'none'}, not {engine_id}")
    return address.hostname, address.port
