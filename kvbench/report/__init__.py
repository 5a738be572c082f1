"""From run folders to tables, pictures and pages. Reads run folders, and nothing else."""
