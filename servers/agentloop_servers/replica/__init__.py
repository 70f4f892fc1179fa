"""An engine replica and its private port: server, client and wire."""
