"""Multi-query attention over the cached latents themselves."""
