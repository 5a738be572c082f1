from typing import Any

def turn(
    epoll_fd: int,
    timeout_ms: int,
    most: int,
    until_ns: int,
    streams: dict[int, tuple[list[bytes], bytearray, Any]],
    noticed: list[tuple[Any, bytes | OSError]],
    others: list[tuple[int, int]],
    /,
) -> int: ...
def usual(
    reads: list[bytes], start: int, before: dict[int, bytes], after: bytes, counts: list[int], /
) -> int: ...
