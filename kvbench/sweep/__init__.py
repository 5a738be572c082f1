"""Find the highest rate of every cell: plan → deploy → check outputs → trial → gate → search → store."""
