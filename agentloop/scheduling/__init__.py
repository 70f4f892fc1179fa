"""Scheduling: the rollout queue, the staleness budget, and the balancer."""
