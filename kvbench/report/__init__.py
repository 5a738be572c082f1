"""Tables, pictures and pages of run folders. Reads nothing else."""
