"""Will it fit: bytes of weights, cache, graphs and the rest on the most loaded device, and what past trials teach."""
