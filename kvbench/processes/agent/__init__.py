"""The agent: one small process on each host of a run, which starts there what kvbench asks for.

``python -m kvbench.processes.agent`` talks JSON lines on stdin and stdout (``launchers/agents/channel.py``).
When its stdin ends or nothing has come for some seconds, whoever started it is gone: it kills all it has
started, and ends.
"""
