"""``kvbench microbench``: from the requested cases to the records of their transfers."""
