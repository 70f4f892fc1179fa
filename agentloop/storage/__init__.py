"""Durable stores on SQLite: the trajectories of a run, and what is read from them."""
