"""`agentloop check-logprobs`: compares recorded logprobs with those of the checkpoints that sampled the tokens."""
