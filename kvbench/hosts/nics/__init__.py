"""Which NICs a machine has, which of them to take, and what is wrong with them."""
