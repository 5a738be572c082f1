"""What several connectors share; no connector of its own."""
