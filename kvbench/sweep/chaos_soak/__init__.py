"""Runs at a fixed rate: faults and their cost (``kvbench chaos``), long runs (``kvbench soak``)."""
