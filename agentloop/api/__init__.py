"""Values that cross a process border: HTTP bodies, sessions, and the coordinator's ports."""
