"""Reports of runs at a held rate: faults and what they cost, windows of hours."""
