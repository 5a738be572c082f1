"""What only a machine with a GPU can show: ``make test-gpu`` there, ``make gpu-kit`` here (docs/gpu.md)."""
