"""What computes and knows no network: devices, stages and their caches, sampling, the tokenizer."""
