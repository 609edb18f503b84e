"""Kimi delta attention over one token of each of many sequences, in a pool of states."""
