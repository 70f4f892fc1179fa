"""`agentloop check-logprobs`: recorded logprobs compared with those of the checkpoints that sampled the tokens."""
