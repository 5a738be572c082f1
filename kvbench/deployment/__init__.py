"""A running deployment: start, liveness, diagnosis of logs, stop, leftovers."""
