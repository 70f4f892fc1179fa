"""The engine interface, and the state machines that all engines share."""
