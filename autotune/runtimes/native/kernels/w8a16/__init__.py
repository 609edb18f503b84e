"""y = x Wᵀ with int8 weights, one scale an output channel, and 16 or 32-bit activations."""
