"""From request records to the figures of a trial."""
