"""The hosts of a scenario: by ssh, from Slurm, from Ray."""
