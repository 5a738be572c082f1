"""The live page of ``kvbench watch --serve``: three addresses on the loopback device, read-only.

``/`` is the page, ``/state.json`` what it shows, ``/watch.js`` its script. Nothing else of this machine can
be had from it, it takes no input but the request line, and it answers no other host name than that of the
loopback device, so that a stranger's page in the same browser cannot read it by way of a name of its own.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

from kvbench.errors import KvbenchError, LaunchError
from kvbench.report.watch.state import RunWatch

HOST: Final = "127.0.0.1"
TEMPLATES: Final = Path(__file__).parents[1] / "templates"
REQUEST_S: Final = 5.0
"""A connection that says nothing for so long is closed."""
_PAGES: Final = {
    "/": ("watch.html", "text/html; charset=utf-8"),
    "/watch.js": ("watch.js", "text/javascript; charset=utf-8"),
}
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'"


@contextmanager
def serving(watch: RunWatch, port: int = 0) -> Iterator[str]:
    """Serves the live page of a watched run folder in a thread; yields its address. Port 0: any that is free.

    Raises LaunchError if the port is taken.
    """
    try:
        server = ThreadingHTTPServer((HOST, port), _handler(watch))
    except OSError as error:
        raise LaunchError(
            f"the live page cannot listen on {HOST}:{port}: {error.strerror}", hint="choose another --port"
        ) from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="watch page", daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=REQUEST_S)


def _handler(watch: RunWatch) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_S
        server_version = "kvbench"
        sys_version = ""

        def do_GET(self) -> None:
            if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
                self._answer(HTTPStatus.FORBIDDEN, b"only for this machine\n", "text/plain")
            elif self.path == "/state.json":
                self._state()
            elif self.path in _PAGES:
                name, kind = _PAGES[self.path]
                self._answer(HTTPStatus.OK, (TEMPLATES / name).read_bytes(), kind)
            else:
                self._answer(HTTPStatus.NOT_FOUND, b"not here\n", "text/plain")

        def _state(self) -> None:
            try:
                status, data = HTTPStatus.OK, watch.look().to_json()
            except KvbenchError as error:
                status, data = HTTPStatus.SERVICE_UNAVAILABLE, {"error": error.message}
            text = json.dumps(data, ensure_ascii=True, allow_nan=False, default=str)
            self._answer(status, text.encode(), "application/json")

        def _answer(self, status: HTTPStatus, content: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Content-Security-Policy", _POLICY)
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass  # the terminal belongs to what is watched

    return Handler
