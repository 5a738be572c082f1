"""``python -m kvbench.cli``: the command ``kvbench``."""

from kvbench.cli.app import main

main()
