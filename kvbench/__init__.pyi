"""What ``import kvbench`` offers, for type checkers: they do not see what is loaded when it is asked for."""

from kvbench.api import Comparison as Comparison
from kvbench.api import Run as Run
from kvbench.api import columns as columns
from kvbench.api import compare as compare
from kvbench.api import load as load
from kvbench.api import runs as runs
from kvbench.api import simulate as simulate
from kvbench.api import simulate_splits as simulate_splits

__version__: str
