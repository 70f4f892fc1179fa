"""Weight versions in a published store: format, publisher, copies on a host."""
