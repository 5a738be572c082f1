"""``kvbench verify``: check a run folder against its own records."""
