"""The simulated engine: a seeded policy, KV cache and scheduler in virtual or real time."""
