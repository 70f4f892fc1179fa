"""The part that adapters of engines share: the gate, pauses, weight updates and constraints."""
