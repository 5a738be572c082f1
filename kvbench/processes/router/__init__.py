"""The P/D router's process: ``python -m kvbench.processes.router SPEC.json``. The connector's pure functions
decide which requests go to P and D, and in which order. Answers are passed on byte for byte. Nothing is
retried; a failure of P is passed on and never becomes an answer of D alone."""
