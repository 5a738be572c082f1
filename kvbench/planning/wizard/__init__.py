"""The questions of ``kvbench init``, and the commented scenario that comes of the answers."""
