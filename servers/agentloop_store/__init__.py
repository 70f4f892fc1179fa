"""Published weight versions in a store: format, publisher, and local copies."""
