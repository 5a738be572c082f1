"""``kvbench doctor``: check what works before anything starts."""
