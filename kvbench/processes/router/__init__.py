"""The P/D router's process: ``python -m kvbench.processes.router SPEC.json``.

Which requests go to P and to D, and in which order, is the connector's to say (the same pure
functions everywhere). Answers are passed on byte for byte. Nothing is retried, and a failure of P
is passed on: it never becomes an answer that D made alone.
"""
