"""Engine adapters. Each package is the only importer of its engine's library, and imports it when an engine
starts."""
