"""What Mooncake Store's return codes mean."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.errors import TransferError

# mooncake-store/include/types.h, ErrorCode
NAMES = {
    -1: "INTERNAL_ERROR",
    -10: "BUFFER_OVERFLOW",
    -101: "SEGMENT_NOT_FOUND",
    -102: "SEGMENT_ALREADY_EXISTS",
    -103: "CLIENT_NOT_FOUND",
    -200: "NO_AVAILABLE_HANDLE",
    -400: "INVALID_KEY",
    -500: "WRITE_FAIL",
    -600: "INVALID_PARAMS",
    -601: "ILLEGAL_CLIENT",
    -700: "INVALID_WRITE",
    -701: "INVALID_READ",
    -702: "INVALID_REPLICA",
    -703: "REPLICA_IS_NOT_READY",
    -704: "OBJECT_NOT_FOUND",
    -705: "OBJECT_ALREADY_EXISTS",
    -706: "OBJECT_HAS_LEASE",
    -707: "LEASE_EXPIRED",
    -712: "REPLICA_IS_GONE",
    -800: "TRANSFER_FAIL",
    -801: "CHECKSUM_MISMATCH",
    -900: "RPC_FAIL",
    -901: "RPC_TIMEOUT",
    -1010: "UNAVAILABLE_IN_CURRENT_STATUS",
}
HINTS = {
    -200: "the segment is full: raise the target's option segment_bytes",
    -704: "it was never put, or was put out by others for want of room",
    -800: "the process that holds the segment is gone, or an address is not registered",
    -900: "the master is gone, or does not answer",
}
OBJECT_NOT_FOUND = -704


def words(code: int) -> str:
    """A return code as its name, with what it most often means."""
    name = f"{NAMES.get(code, 'unknown code')} ({code})"
    return f"{name}: {HINTS[code]}" if code in HINTS else name


def require_all(what: str, codes: Sequence[int], wanted: int) -> None:
    """Raises TransferError that names the first code that is not the wanted one."""
    for code in codes:
        if code != wanted:
            wrong = sum(other != wanted for other in codes)
            said = words(code) if code < 0 else f"{code} of {wanted} bytes"
            raise TransferError(f"{what} of {wrong} of {len(codes)} objects failed: {said}")
