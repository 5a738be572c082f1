"""Channels over ssh (asyncssh); host keys are always verified. All connections share one event loop in a
thread. Errors come with a hint."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import shlex
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvbench.core.scenario.hosts import Ssh
from kvbench.errors import LaunchError, MissingLibraryError
from kvbench.launchers.agents.channel import (
    CLOSE_GRACE_S,
    READ_BYTES,
    SEND_DEADLINE_S,
    TAIL_LINES,
    ChannelClosedError,
    Inbox,
    Lines,
    ended_words,
)

if TYPE_CHECKING:
    import asyncssh


DEFAULT_PORT: Final = 22


def ssh_library() -> Any:
    """Import asyncssh. Raises MissingLibraryError."""
    try:
        import asyncssh
    except ImportError as error:
        raise MissingLibraryError(
            f"launcher ssh needs asyncssh: {error}", hint="pip install asyncssh"
        ) from error
    return asyncssh


def by_hand(name: str, ssh: Ssh) -> str:
    parts = ["ssh"]
    parts += [f"-F {ssh.config}"] if ssh.config else []
    parts += [f"-o UserKnownHostsFile={ssh.known_hosts}"] if ssh.known_hosts else []
    parts += [f"-i {ssh.key}"] if ssh.key else []
    parts += [f"-p {ssh.port}"] if ssh.port else []
    parts.append(f"{ssh.user}@{ssh.host or name}" if ssh.user else ssh.host or name)
    return " ".join(parts)


def connection_error(error: Exception, name: str, ssh: Ssh) -> LaunchError:
    """Create the error for a failed connection, with a hint."""
    asyncssh = ssh_library()
    port = ssh.port or DEFAULT_PORT
    where = f"{name} ({ssh.host or name}:{port})"
    trying = f"try it by hand: {by_hand(name, ssh)} true"
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        return _unverified(name, ssh, port)
    if isinstance(error, asyncssh.PermissionDenied):
        user = ssh.user or getpass.getuser()
        key = ssh.key or "the keys of ~/.ssh and of the ssh agent"
        return LaunchError(
            f"{where} refuses the login of {user} with {key}",
            hint=f"put its public half into ~{user}/.ssh/authorized_keys there, or set ssh.user and ssh.key; "
            + trying,
        )
    if isinstance(error, (asyncssh.KeyImportError, asyncssh.KeyEncryptionError)):
        return LaunchError(
            f"the key {ssh.key} for {where} cannot be used: {error}",
            hint="give an OpenSSH private key; one with a passphrase goes into the ssh agent: ssh-add",
        )
    if isinstance(error, FileNotFoundError):
        return LaunchError(
            f"{error.filename or error} for {where} does not exist", hint="see ssh.key, ssh.config"
        )
    if isinstance(error, ConnectionRefusedError):
        return LaunchError(
            f"{where} refuses the connection", hint=f"is sshd running there, on that port? {trying}"
        )
    if isinstance(error, (asyncio.TimeoutError, FutureTimeoutError, TimeoutError)):
        return LaunchError(
            f"{where} did not answer within {ssh.connect_timeout_s:g} s",
            hint=f"is it up, and no firewall in between? {trying}",
        )
    if isinstance(error, MissingLibraryError):
        return LaunchError(error.message, hint=error.hint)
    return LaunchError(f"no ssh connection to {where}: {str(error) or type(error).__name__}", hint=trying)


def _unverified(name: str, ssh: Ssh, port: int) -> LaunchError:
    """Create the error for a failed host key check: unknown host, or changed key."""
    asyncssh = ssh_library()
    path = Path(ssh.known_hosts or "~/.ssh/known_hosts").expanduser()
    host = ssh.host or name
    known: tuple[Any, ...] = ()
    with contextlib.suppress(OSError, ValueError):
        known = asyncssh.read_known_hosts(str(path)).match(host, host, port)
    if any(known[:2]):
        shown = host if port == DEFAULT_PORT else f"[{host}]:{port}"
        return LaunchError(
            f"{name} has a different key than in {path}: it was reinstalled, or another machine answers",
            hint=f"if you know that it was reinstalled: ssh-keygen -f {path} -R '{shown}', then connect once "
            f"by hand: {by_hand(name, ssh)}",
        )
    return LaunchError(
        f"{name} is not in {path}, so its identity cannot be verified",
        hint=f"connect once by hand and compare its key's fingerprint: {by_hand(name, ssh)}",
    )


T = TypeVar("T")

KEEPALIVE_S: Final = 2.0
KEEPALIVES: Final = 3
"""Unanswered keepalives that end the connection; heartbeats detect a loss earlier."""
PUT_S: Final = 60.0
SLOWEST_BYTES_PER_S: Final = 1e6
"""Slowest file transfer, in bytes per second; below it counts as stuck."""


class SshChannel:
    def __init__(
        self,
        host: str,
        loop: asyncio.AbstractEventLoop,
        connection: asyncssh.SSHClientConnection,
        process: asyncssh.SSHClientProcess[bytes],
    ) -> None:
        self.host = host
        self._loop = loop
        self._connection = connection
        self._process = process
        self._inbox = Inbox(host)
        self._stderr_lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._closing = False
        self._reading = asyncio.run_coroutine_threadsafe(self._read(), loop)

    @property
    def ended(self) -> str:
        return self._inbox.ended

    def send(self, line: bytes) -> None:
        if self._inbox.ended or self._closing:
            raise self._inbox.closed()
        sent = asyncio.run_coroutine_threadsafe(self._write(line + b"\n"), self._loop)
        try:
            sent.result(SEND_DEADLINE_S)
        except FutureTimeoutError:
            sent.cancel()
            raise self._inbox.stuck() from None
        except Exception as error:  # asyncssh's or the system's: the line was not sent
            why = self._inbox.ended or f"the connection to {self.host} was lost: {error}"
            raise ChannelClosedError(why) from error

    def receive(self, timeout_s: float) -> bytes | None:
        return self._inbox.receive(timeout_s)

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        closed = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        with contextlib.suppress(Exception):
            closed.result(CLOSE_GRACE_S + 2.0)
        self._inbox.close()

    async def _write(self, data: bytes) -> None:
        self._process.stdin.write(data)
        await self._process.stdin.drain()

    async def _read(self) -> None:
        lines, err = Lines(), asyncio.create_task(self._read_err())
        try:
            while data := await self._process.stdout.read(READ_BYTES):
                for line in lines.feed(data):
                    self._inbox.put(line)
            await asyncio.wait_for(self._process.wait_closed(), 2.0)
            await asyncio.wait_for(err, 1.0)
        except Exception as error:  # the connection was lost, in one of asyncssh's many ways
            self._stderr_lines.append(str(error) or type(error).__name__)
        finally:
            err.cancel()
            status = self._process.exit_status
            self._inbox.finish(
                f"the connection to {self.host} was lost"
                + "".join(f": {text}" for text in [*self._stderr_lines][-1:])
                if status is None
                else ended_words(self.host, status, list(self._stderr_lines))
            )

    async def _read_err(self) -> None:
        with contextlib.suppress(Exception):
            async for line in self._process.stderr:
                if text := line.decode("utf-8", "replace").strip():
                    self._stderr_lines.append(text)

    async def _close(self) -> None:
        with contextlib.suppress(Exception):
            self._process.stdin.write_eof()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._process.wait_closed(), CLOSE_GRACE_S)
        self._connection.abort()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._connection.wait_closed(), 1.0)


class SshConnections:
    """Creates channels; keeps their event loop until ``close``."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ssh", daemon=True)
        self._thread.start()

    def channel(self, name: str, ssh: Ssh, command: str) -> SshChannel:
        """Run ``command`` on the host ``name``. Raises LaunchError with a hint."""
        connection = self._open_connection(name, ssh)

        async def begin() -> asyncssh.SSHClientProcess[bytes]:
            return await connection.create_process(command, encoding=None)

        try:
            process = self._run(begin(), ssh.connect_timeout_s)
        except Exception as error:
            self._disconnect(connection)
            raise LaunchError(
                f"{name} accepts no command by ssh: {error}", hint=by_hand(name, ssh)
            ) from error
        return SshChannel(name, self._loop, connection, process)

    def put(self, name: str, ssh: Ssh, source: Path, folder: str) -> str:
        """Copy a file to a remote folder, created if missing; return its path there."""
        connection = self._open_connection(name, ssh)

        async def copy() -> str:
            async with connection.start_sftp_client() as sftp:
                home = await sftp.realpath(".")
                where = folder.replace("~", str(home), 1) if folder.startswith("~") else folder
                await sftp.makedirs(where, exist_ok=True)
                await sftp.put(str(source), f"{where}/{source.name}")
                return f"{where}/{source.name}"

        try:
            return self._run(copy(), PUT_S + source.stat().st_size / SLOWEST_BYTES_PER_S)
        except Exception as error:
            raise LaunchError(f"cannot copy {source.name} to {name}: {error}") from error
        finally:
            self._disconnect(connection)

    def output(self, name: str, ssh: Ssh, command: str, deadline_s: float) -> tuple[int, str]:
        """Return a command's exit status and output with stderr. Raises LaunchError."""
        connection = self._open_connection(name, ssh)

        async def run_command() -> tuple[int, str]:
            # The end of a connection does not end the remote command.
            bounded = f"timeout -k 1 {deadline_s:g} sh -c {shlex.quote(command)} 2>&1"
            done = await connection.run(bounded, encoding="utf-8", errors="replace")
            return (-1 if done.exit_status is None else done.exit_status), str(done.stdout)

        try:
            status, text = self._run(run_command(), deadline_s + 2.0)
        except FutureTimeoutError:
            raise LaunchError(f"{name}: {command!r} took longer than {deadline_s:g} s") from None
        except Exception as error:
            raise LaunchError(f"{name}: {command!r} could not be run: {error}") from error
        finally:
            self._disconnect(connection)
        if status in (124, 137):  # as timeout(1) has it
            raise LaunchError(f"{name}: {command!r} took longer than {deadline_s:g} s")
        return status, text

    def close(self) -> None:
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(2.0)
        if not self._loop.is_running() and not self._loop.is_closed():
            pending = asyncio.all_tasks(self._loop)
            for task in pending:
                task.cancel()
            with contextlib.suppress(Exception):
                if pending:
                    self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
            self._loop.close()

    def _run(self, what: Coroutine[Any, Any, T], deadline_s: float) -> T:
        running = asyncio.run_coroutine_threadsafe(what, self._loop)
        try:
            return running.result(deadline_s)
        except FutureTimeoutError:
            running.cancel()
            raise

    def _disconnect(self, connection: asyncssh.SSHClientConnection) -> None:
        async def disconnect() -> None:
            connection.abort()
            await connection.wait_closed()

        with contextlib.suppress(Exception):
            self._run(disconnect(), 2.0)

    def _open_connection(self, name: str, ssh: Ssh) -> asyncssh.SSHClientConnection:
        library = ssh_library()
        options = connect_options(ssh)

        async def connect() -> asyncssh.SSHClientConnection:
            connection: asyncssh.SSHClientConnection = await library.connect(ssh.host or name, **options)
            return connection

        try:
            return self._run(connect(), ssh.connect_timeout_s + 5.0)
        except Exception as error:
            raise connection_error(error, name, ssh) from error


def connect_options(ssh: Ssh) -> dict[str, Any]:
    """Options for asyncssh; unset ones come from ~/.ssh/config."""
    options: dict[str, Any] = {
        "connect_timeout": ssh.connect_timeout_s,
        "login_timeout": ssh.connect_timeout_s,
        "keepalive_interval": KEEPALIVE_S,
        "keepalive_count_max": KEEPALIVES,
        "preferred_auth": "publickey,gssapi-with-mic,hostbased",  # a password cannot be typed
    }
    if ssh.port is not None:
        options["port"] = ssh.port
    if ssh.user:
        options["username"] = ssh.user
    if ssh.key:
        options["client_keys"] = [str(Path(ssh.key).expanduser())]
    if ssh.known_hosts:
        options["known_hosts"] = str(Path(ssh.known_hosts).expanduser())
    if ssh.config:
        options["config"] = [str(Path(ssh.config).expanduser())]
    return options


def connector(hosts: Callable[[str], Ssh], connections: SshConnections) -> Callable[[str, str], SshChannel]:
    """Return a fleet's function: (host name, command) → channel."""
    return lambda name, command: connections.channel(name, hosts(name), command)
