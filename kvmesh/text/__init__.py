"""Text and tokens: what the gateway does with a model's tokenizer and chat template. Torch-free."""
