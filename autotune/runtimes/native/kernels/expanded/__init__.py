"""Multi-head attention over keys and values made again from the cached latents."""
