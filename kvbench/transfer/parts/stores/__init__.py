"""Code shared by backends that move bytes through a store."""
