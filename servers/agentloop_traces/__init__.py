"""OpenTelemetry traces of trajectories and weight updates."""
