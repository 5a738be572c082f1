"""The command line: parses, calls one function, prints. What is heavy is imported inside functions."""

from kvbench.cli.app import main as main
