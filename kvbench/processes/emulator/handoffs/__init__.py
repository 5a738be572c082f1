"""KV hand-off from an emulated P to D: the pull and the push handshake, and their common parts."""
