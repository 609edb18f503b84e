"""Kimi delta attention over many tokens of one sequence, by chunks."""
