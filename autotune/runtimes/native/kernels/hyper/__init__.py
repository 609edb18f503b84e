"""How a block reads the hyper-connected residual streams."""
