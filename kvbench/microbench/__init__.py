"""``kvbench microbench``: from the cases that are asked for to the records of their transfers."""
