"""Kernels in Triton for programs that are built on torch; what needs no torch is in ``trapetum.kernels.cuda``."""
