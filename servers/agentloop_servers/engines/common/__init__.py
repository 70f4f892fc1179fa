"""The part that adapters of engines share: the gate, pauses, weight updates, constraints, the event feed."""
