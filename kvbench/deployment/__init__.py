"""A running deployment: start, liveness, log diagnosis, stop, leftovers."""
