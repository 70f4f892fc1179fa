"""The OpenAI-compatible endpoint: sessions on disk, their routes, and their shards."""
