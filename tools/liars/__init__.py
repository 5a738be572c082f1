"""The liars' bench: plants every lie in a real trial and demands that its gate names it, of servers that tell
all of themselves and of foreign ones without /metrics; and that none of fifty honest trials raises an alarm.
``tools/random_systems/honest.py`` demands the same of honest trials on systems drawn at random.

``python -m tools.liars`` or ``make liars``; exit code 1 if a lie got through or an honest trial did not.
"""
