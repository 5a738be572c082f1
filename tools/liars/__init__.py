"""The liars' bench: plants every lie in a real trial and demands that its gate names it, of servers that tell
all of themselves and of foreign ones without /metrics; and that no honest trial raises an alarm, neither real
ones nor hundreds on systems drawn at random (``tools/random_systems``).

``python -m tools.liars`` or ``make liars``; exit code 1 if a lie got through or an honest trial did not.
"""
