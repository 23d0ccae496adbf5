"""CUDA kernels: sources shipped with the package, compiled for the card at hand when they are first used."""
