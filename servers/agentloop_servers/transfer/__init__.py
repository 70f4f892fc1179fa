"""How new weights reach an engine. `checkpoint` is pure Python; `directory` runs inside the engine's worker."""
