"""Text and tokens: a model's tokenizer, its chat template, and text that comes token by token. Torch-free."""
