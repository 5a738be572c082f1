"""What the router costs: ``make perf-router``. A benchmark, not a test: it judges nothing.

The same open-loop load goes to the exact server around the router and through it, in turn. What is added to
the time to the first token is found by the server's log, request by request, so that the server's own
lateness does not count; what the client is off by itself is taken off as the figure of the direct way.

A third way goes through a plain TCP proxy in C that knows no HTTP (plain_proxy.c): what that adds, this
machine adds to any proxy, and the router's figures are to be read beside it.
"""
