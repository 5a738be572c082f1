"""Let a test be a coroutine: its fixture ``run``, its module's ``on_loop``, or uvloop runs it."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from contextvars import ContextVar
from typing import Any

import pytest
import uvloop

DEADLINE_S = 60.0
_OPEN: ContextVar[AsyncExitStack] = ContextVar("_OPEN")


def close_at_end(close: Callable[[], Awaitable[Any]]) -> None:
    """Call this when the running test ends, before what was given earlier."""
    _OPEN.get().push_async_callback(close)


def on_asyncio(main: Callable[[], Awaitable[Any]]) -> None:
    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def on_uvloop(main: Callable[[], Awaitable[Any]]) -> None:
    async def closing() -> None:
        await asyncio.wait_for(main(), DEADLINE_S)
        await asyncio.sleep(0.02)  # the servers' side notices the closed connections

    uvloop.run(closing())


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine; leave all others to pytest."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    fixtures = pyfuncitem.funcargs

    async def main() -> None:
        async with AsyncExitStack() as stack:
            _OPEN.set(stack)
            await pyfuncitem.obj(**{name: fixtures[name] for name in pyfuncitem._fixtureinfo.argnames})

    (fixtures.get("run") or getattr(pyfuncitem.module, "on_loop", on_uvloop))(main)
    return True
