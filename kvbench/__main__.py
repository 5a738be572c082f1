"""``python -m kvbench``: the same as the command ``kvbench``."""

from kvbench.cli import main

if __name__ == "__main__":
    main()
