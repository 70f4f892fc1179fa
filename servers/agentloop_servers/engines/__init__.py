"""Adapters: one file an engine, each the only importer of its vendor's package, and only where one starts."""
