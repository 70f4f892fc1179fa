"""The chat endpoint without its HTTP: what a call asks, what a turn answers, and the dialects that say so."""
