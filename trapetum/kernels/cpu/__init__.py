"""CPU decoders (numba)."""
