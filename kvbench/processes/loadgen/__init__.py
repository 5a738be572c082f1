"""The open-loop load generator's process: ``python -m kvbench.processes.loadgen SPEC.json``. Sends are
planned beforehand and never wait for answers. The hot path timestamps and stores bytes; they are parsed in
idle time or at the end. Nothing is retried, and the records contain every request that came due, with its
failure class."""
