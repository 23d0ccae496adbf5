"""Decoders: the hot loops that turn stored codes into numbers and products, on the CPU and on CUDA devices."""
