"""clover-tiny: the PyTorch reference of the model, its task data, its tokenizer and its training."""
