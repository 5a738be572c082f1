"""How an emulated P hands its KV to D: the pull and the push handshake, and what both share."""
