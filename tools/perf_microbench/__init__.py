"""Transfers beside the library's own C++ tool, plain copies and the bare call. ``make perf-microbench``."""
