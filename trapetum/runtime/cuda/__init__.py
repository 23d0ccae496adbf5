"""A model on the card: the whole decode step as one CUDA graph (``--device cuda``)."""
