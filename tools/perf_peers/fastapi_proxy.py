"""A P/D proxy as one writes it with FastAPI and httpx in a few lines. Run in an environment with both.

``python fastapi_proxy.py PORT PREFILL_URL DECODE_URL``: P first with one token, its ``kv_transfer_params``
go to D, whose stream is passed on.
"""

import sys
from collections.abc import AsyncIterator
from importlib import import_module
from typing import Any


def application(prefill_url: str, decode_url: str) -> Any:
    import httpx

    fastapi: Any = import_module("fastapi")

    app = fastapi.FastAPI()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    prefill, decode = (
        httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False)
        for url in (prefill_url, decode_url)
    )

    async def health() -> dict[str, str]:
        return {"status": "ok"}

    async def complete(request: Any) -> Any:
        body = await request.json()
        first = {
            **{key: value for key, value in body.items() if key not in ("stream_options", "min_tokens")},
            "max_tokens": 1,
            "stream": False,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }
        answer = await prefill.post("/v1/completions", json=first)
        answer.raise_for_status()
        body["kv_transfer_params"] = answer.json().get("kv_transfer_params")

        async def stream() -> AsyncIterator[bytes]:
            async with decode.stream("POST", "/v1/completions", json=body) as source:
                async for data in source.aiter_bytes():
                    yield data

        streaming: Any = import_module("fastapi.responses").StreamingResponse
        return streaming(stream(), media_type="text/event-stream")

    # Not as a decorator with an annotation: FastAPI is imported in here only, where it could not resolve it.
    complete.__annotations__["request"] = fastapi.Request
    app.get("/health")(health)
    app.post("/v1/completions")(complete)
    return app


if __name__ == "__main__":
    uvicorn: Any = import_module("uvicorn")
    port, *urls = sys.argv[1:]
    uvicorn.run(application(*urls), host="127.0.0.1", port=int(port), log_level="warning")
