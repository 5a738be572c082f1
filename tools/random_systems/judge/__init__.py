"""The product's search judged on drawn systems: how near its answers are, and how often its intervals hold.

The module ``search`` drives what ``kvbench simulate --system`` drives, in this process and without a report,
so that a thousand searches take an hour, and compares an answer with the truth; ``figures`` counts, ``twins``
asks who is ahead of two, and ``rivals`` plays other tools' rules. A run that was broken off is resumed from
its rows.
"""
