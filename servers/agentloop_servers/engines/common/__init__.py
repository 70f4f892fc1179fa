"""Code that all engine adapters share: request gate, pauses, weight updates and constraint checks."""
