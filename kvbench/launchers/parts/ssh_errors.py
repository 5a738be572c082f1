"""What stands between us and a host over ssh, and what to do about it."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any, Final

from kvbench.core.scenario.hosts import Ssh
from kvbench.errors import LaunchError, MissingLibraryError

DEFAULT_PORT: Final = 22


def ssh_library() -> Any:
    """asyncssh. Raises MissingLibraryError."""
    try:
        import asyncssh
    except ImportError as error:
        raise MissingLibraryError(
            f"launcher ssh needs asyncssh: {error}", hint="pip install 'kvbench[ssh]'"
        ) from error
    return asyncssh


def by_hand(name: str, wanted: Ssh) -> str:
    """The ssh command that does the same by hand."""
    words = ["ssh"]
    words += [f"-F {wanted.config}"] if wanted.config else []
    words += [f"-o UserKnownHostsFile={wanted.known_hosts}"] if wanted.known_hosts else []
    words += [f"-i {wanted.key}"] if wanted.key else []
    words += [f"-p {wanted.port}"] if wanted.port else []
    words.append(f"{wanted.user}@{wanted.host or name}" if wanted.user else wanted.host or name)
    return " ".join(words)


def explained(error: Exception, name: str, wanted: Ssh) -> LaunchError:
    """What stood between us and a host, and what to do about it."""
    asyncssh = ssh_library()
    port = wanted.port or DEFAULT_PORT
    where = f"{name} ({wanted.host or name}:{port})"
    trying = f"try it by hand: {by_hand(name, wanted)} true"
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        return _unverified(name, wanted, port)
    if isinstance(error, asyncssh.PermissionDenied):
        user = wanted.user or getpass.getuser()
        key = wanted.key or "the keys of ~/.ssh and of the ssh agent"
        return LaunchError(
            f"{where} refuses the login of {user} with {key}",
            hint=f"put its public half into ~{user}/.ssh/authorized_keys there, or set ssh.user and ssh.key; "
            + trying,
        )
    if isinstance(error, (asyncssh.KeyImportError, asyncssh.KeyEncryptionError)):
        return LaunchError(
            f"the key {wanted.key} for {where} cannot be used: {error}",
            hint="give an OpenSSH private key; one with a passphrase goes into the ssh agent: ssh-add",
        )
    if isinstance(error, FileNotFoundError):
        return LaunchError(
            f"{error.filename or error} for {where} is not there", hint="see ssh.key, ssh.config"
        )
    if isinstance(error, ConnectionRefusedError):
        return LaunchError(
            f"{where} refuses the connection", hint=f"is sshd running there, on that port? {trying}"
        )
    if isinstance(error, (asyncio.TimeoutError, FutureTimeoutError, TimeoutError)):
        return LaunchError(
            f"{where} did not answer within {wanted.connect_timeout_s:g} s",
            hint=f"is it up, and no firewall in between? {trying}",
        )
    if isinstance(error, MissingLibraryError):
        return LaunchError(error.message, hint=error.hint)
    return LaunchError(f"no ssh connection to {where}: {str(error) or type(error).__name__}", hint=trying)


def _unverified(name: str, wanted: Ssh, port: int) -> LaunchError:
    """Unknown, or not who it was: the file of known hosts decides which."""
    asyncssh = ssh_library()
    path = Path(wanted.known_hosts or "~/.ssh/known_hosts").expanduser()
    host = wanted.host or name
    known: tuple[Any, ...] = ()
    with contextlib.suppress(OSError, ValueError):
        known = asyncssh.read_known_hosts(str(path)).match(host, host, port)
    if any(known[:2]):
        shown = host if port == DEFAULT_PORT else f"[{host}]:{port}"
        return LaunchError(
            f"{name} shows another key than {path} has for it: it was set up anew, or it is somebody else",
            hint=f"if you know that it was set up anew: ssh-keygen -f {path} -R '{shown}', then connect once "
            f"by hand: {by_hand(name, wanted)}",
        )
    return LaunchError(
        f"{name} is not in {path}, so nobody knows whether it is the host that you mean",
        hint=f"connect once by hand and compare its key's fingerprint: {by_hand(name, wanted)}",
    )
