"""Trajectories in processes of their own, so that user code can harm nobody but its own trajectory."""
