"""The C extensions and their tests under sanitizers (``make sanitize``)."""
