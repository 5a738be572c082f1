"""The agent: one small process on each host of a run, which starts processes there for kvbench. ``python -m
kvbench.processes.agent`` exchanges JSON lines on stdin and stdout (``launchers/agents/channel.py``). When
stdin ends, or nothing arrives for some seconds, it kills everything it started and exits."""
