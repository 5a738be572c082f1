"""Runs at a held rate: faults and what they cost (``kvbench chaos``), hours on end (``kvbench soak``)."""
