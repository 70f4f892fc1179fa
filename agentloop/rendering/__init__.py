"""Messages to token ids and back: template, tokenizer, and the bridge between turns."""
