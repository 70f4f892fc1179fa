"""The simulated engine: a seeded token policy, a KV cache and a scheduler, in virtual or real time."""
