"""Trajectories in processes of their own, so that user code can harm its own trajectory alone."""
