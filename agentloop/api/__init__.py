"""Types of data that processes exchange: HTTP bodies, sessions, and the coordinator's ports."""
