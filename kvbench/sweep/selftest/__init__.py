"""This machine's own error, measured against servers whose schedule is exact."""
