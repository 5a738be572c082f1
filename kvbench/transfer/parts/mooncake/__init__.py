"""What the backends share that drive Mooncake: its package, its engines, its codes."""
