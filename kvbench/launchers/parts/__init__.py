"""What the launchers share: agents, channels, guards, ports; no launcher of its own."""
