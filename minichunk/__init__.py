"""minichunk: a small, complete LLM inference engine that runs prompts and decodes together in mixed batches."""
