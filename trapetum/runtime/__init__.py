"""Torch-free forward pass over any source: logits, generation, perplexity, comparison, verification."""
