"""A checkpoint's text side: where it comes from, its tokenizer and its chat template."""
