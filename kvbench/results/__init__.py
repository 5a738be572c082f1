"""The run folder: written, read, locked, and where its numbers come from."""
