"""The engine: a model with its tokenizer, the generation loop, and what a generation took."""
