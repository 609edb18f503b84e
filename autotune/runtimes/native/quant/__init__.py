"""Weights as they are really stored, and the products that read them."""
