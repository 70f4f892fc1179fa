"""PostgreSQL as the storage backend of a run's records, sessions and turn journals."""
