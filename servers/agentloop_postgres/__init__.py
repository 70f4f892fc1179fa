"""A run's records, sessions and turn journals in PostgreSQL."""
