"""Code that several of the processes share."""
