"""y = x Wᵀ with 4-bit weights in groups of inputs, scale and minimum a group, and 16 or 32-bit activations."""
