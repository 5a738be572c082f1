"""Pictures of runs at a held rate."""
