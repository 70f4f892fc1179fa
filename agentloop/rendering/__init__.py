"""Chat messages to token ids and back: chat template, tokenizer, and the bridge between turns."""
