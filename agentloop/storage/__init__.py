"""Durable storage of a run: its trajectories in SQLite or another database, and summaries and exports of them."""
