"""What several importers share; no format of its own."""
