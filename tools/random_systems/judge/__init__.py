"""The product's search judged on drawn systems: how near its answers are, and how often its intervals hold.

Its search drives what ``kvbench simulate --system`` drives, in this process and without a report, so that
a thousand searches take an hour; ``judged.py`` compares an answer with the truth, ``many.py`` runs many and
goes on where it was broken off, ``figures.py`` counts, ``twins.py`` asks who is ahead of two, and
``rivals.py`` plays other tools' rules.
"""
