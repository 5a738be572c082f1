"""A machine: devices, environment, telemetry, lab."""
