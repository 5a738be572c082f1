"""The command line: each command parses, calls one function, prints. Heavy imports are inside functions."""

from kvbench.cli.app import main as main
