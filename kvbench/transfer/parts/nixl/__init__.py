"""Parts of the NIXL backend: its agent, its plugins."""
