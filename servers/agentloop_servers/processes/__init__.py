"""The wiring of each kind of process, and the placement of processes by Ray Serve."""
