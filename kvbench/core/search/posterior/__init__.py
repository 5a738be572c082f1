"""What a search believes of the rate looked for: what trials say, how likely that is, what follows."""
