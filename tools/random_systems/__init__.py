"""Systems drawn at random, their true highest rates, and a process that plays them: to judge a search by.

Nothing here uses the product's own simulations: queues.py and the formulas of truth.py are written from
textbooks, so that an error of kvbench is not repeated in what it is measured against. family.py draws a
system (system.py says what it is), simulate.py answers a trial with it, truth.py says what is to be found,
and serve.py speaks the protocol of ``kvbench simulate --system COMMAND``.

Seeds of the family: ``develop`` to work on, ``check`` to look at with each commit, ``release`` and those
named after it for a release only. Nothing may ever be tuned to these, nor a system of them examined.
"""
