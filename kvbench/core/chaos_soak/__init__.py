"""What is asked of a system at a held rate: what faults cost it, and whether it drifts over hours."""
