"""The fleet of engine replicas: registry, weight updates, and bringing replicas to the desired state."""
