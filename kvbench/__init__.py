"""kvbench: finds the highest request rate that prefill/decode (P/D) serving holds under its SLO."""

__version__ = "0.1.0"
