"""The open-loop load generator's process: ``python -m kvbench.processes.loadgen SPEC.json``.

Sends are planned beforehand and never wait for answers. The hot path stamps what arrives and keeps
the bytes; what they mean is found out in idle time or at the end. Nothing is retried, and every
request that came due is in the records, with the class of its failure if it failed.
"""
