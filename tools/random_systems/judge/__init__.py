"""Judge kvbench's search on drawn systems: the error of its answers, and the coverage of its intervals.

``search`` runs ``kvbench simulate --system`` in this process and without a report (1,000 searches take about
an hour), and compares each answer with the truth. ``figures`` counts, ``twins`` compares pairs of similar
systems, and ``rivals`` applies other tools' rules. An interrupted run resumes from its rows.
"""
