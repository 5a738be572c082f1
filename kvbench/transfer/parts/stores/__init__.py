"""What the backends share whose bytes go through a store."""
