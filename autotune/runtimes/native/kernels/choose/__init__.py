"""Which pools of tokens each query of the sparse attention reads."""
