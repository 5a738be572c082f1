"""Somebody else's simulator under the product's whole search: its process, its answers, trials from them."""
