"""Code that several transfer backends share, and larger parts of single ones."""
