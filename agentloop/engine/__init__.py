"""The interface of an engine, and the state machines that every engine shares."""
