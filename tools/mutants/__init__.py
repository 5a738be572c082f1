"""Mutation testing: are the tests such that a small change of the code could not go unseen?

``make mutants``, or ``python -m tools.mutants [--sample 300] [--minutes 15] [FILE or FOLDER ...]``. Each
mutant is one small change of one module (``operators.py``). It is made in the memory of a process of its
own, which then runs the tests that reach its line (``reach.py``), the nearest and quickest first, until one
fails. No file of the package is ever written. What tests start as processes of their own runs without the
change.

It is our own, since the usual two do not fit: mutmut (3.8) leaves out properties, most decorated functions
and the constants of modules, and takes no sample; cosmic-ray (8.7) writes each mutant into the source file,
and starts Python and all tests anew for it.

Results lie in ``build/mutants/`` and are gone on with: what was killed stays so while its module is as it
was; what survived is tried again once a test has changed. A mutant that no test could tell from the
original is listed in ``equivalent.yaml``, with the reason, and does not count.
"""
