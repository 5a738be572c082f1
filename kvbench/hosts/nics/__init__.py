"""NICs of a machine: detection, choice and problems."""
