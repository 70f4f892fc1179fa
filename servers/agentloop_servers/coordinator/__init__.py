"""The coordinator: fleet, balancer, rollout queue and weight updates in one event loop."""
