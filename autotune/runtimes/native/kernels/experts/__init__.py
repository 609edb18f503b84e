"""Routed experts over stacked weights at 16, 8 or 4 bits, without reading the routing on the host."""
