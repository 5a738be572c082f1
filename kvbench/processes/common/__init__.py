"""What several of the processes share."""
