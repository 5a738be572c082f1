"""How often ``kvbench compare --ci`` gives a false alarm, and how often it sees a loss."""
