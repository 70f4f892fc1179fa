"""The chat endpoint over HTTP: sessions, their routes, and where they are kept."""
