"""Models by name: published GGUF files, Hugging Face hub ids and local `.gguf` files as model folders."""
