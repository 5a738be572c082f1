"""Random systems with known maximum rates, and a process that simulates them, to judge the search.

Nothing here uses the product's simulations: queues.py and the formulas of truth.py follow textbooks, so that
an error of kvbench does not also appear in the reference. family.py draws a system (defined in system.py),
simulate.py computes its response to a trial, truth.py computes its true rate, and serve.py implements the
protocol of ``kvbench simulate --system COMMAND``.

Seeds of the family: ``develop`` for development, ``check`` for each commit, ``release`` and those named after
it for a release only. Never tune anything to a release seed, and never examine one of its systems.
"""
