"""Plan → deploy → ask → trial → gate → tell → store: finds the highest rate of every cell."""
