"""kvbench's version, said here alone."""

__version__ = "0.1.0"
