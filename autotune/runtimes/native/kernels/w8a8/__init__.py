"""y = x Wᵀ with int8 weights and int8 activations, accumulated in int32."""
