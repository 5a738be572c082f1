"""The reports of microbenchmarks, and comparisons of them."""
