"""What a session remembers of the calls that clients made: a graph of turns, token for token."""
