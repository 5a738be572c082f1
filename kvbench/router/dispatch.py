"""One request on its way to P and D, in the order that the connector wants."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from kvbench.connectors.base import Connector
from kvbench.http1 import Request, Response
from kvbench.router.body import ClientBody
from kvbench.router.legs import LegError, Splice, Timing, decode, prefill
from kvbench.router.spec import Backend

_PASSED_ON: Final = ("authorization", "user-agent", "traceparent")
"""The client's headers that P and D get too."""


class Dispatch:
    """One request on its way to P and D."""

    def __init__(
        self,
        connector: Connector,
        request: Request,
        response: Response,
        body: ClientBody,
        request_id: str,
        timing: Timing,
    ) -> None:
        self._connector = connector
        self._request = request
        self._response = response
        self._body = body
        self._request_id = request_id
        self._timing = timing
        self._headers = {
            "content-type": "application/json",
            **{name: request.headers[name] for name in _PASSED_ON if name in request.headers},
        }

    async def run(self, p: Backend | None, d: Backend) -> Splice:
        """Sends to P and D as the connector wants it.

        The client's stream may end (``Splice.finish``) only after this: when both have succeeded.
        """
        peer_id = self._request_id
        if p is not None:
            peer_id = self._connector.backend_request_id(self._request_id, p.peer(), d.side_address)
        self._headers["x-request-id"] = peer_id
        if p is None:
            return await self._decode(d, None, None)
        if self._connector.dispatch == "sequential":
            answer = await self._prefill(p)
            missing = self._connector.missing_in_prefill_response(answer)
            if missing:
                raise LegError.of(p, "bad_answer", 502, f"the answer lacks {', '.join(missing)}")
            return await self._decode(d, p, answer)
        legs = (asyncio.ensure_future(self._prefill(p)), asyncio.ensure_future(self._decode(d, p, None)))
        try:
            await asyncio.gather(*legs)
        finally:
            for leg in legs:
                leg.cancel()
            await asyncio.gather(*legs, return_exceptions=True)
        return legs[1].result()

    async def _prefill(self, p: Backend) -> dict[str, Any]:
        fields = self._connector.prefill_request(self._body.fields, self._request_id, p.peer())
        return await prefill(p, self._bytes_for(p, fields), self._timing)

    async def _decode(self, d: Backend, p: Backend | None, answer: dict[str, Any] | None) -> Splice:
        fields = self._body.fields
        if p is not None:
            fields = self._connector.decode_request(fields, answer, self._request_id, p.peer())
        headers = {"x-request-id": self._request_id}
        return await decode(d, self._bytes_for(d, fields), self._response, headers, self._timing)

    def _bytes_for(self, backend: Backend, fields: dict[str, Any]) -> bytes:
        return backend.pool.request("POST", self._request.path, self._headers, self._body.encode(fields))
