"""What a machine is and does: devices, environment, telemetry."""
