"""Where the processes of a run are, whichever launcher reaches the hosts."""
