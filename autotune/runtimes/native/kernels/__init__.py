"""Operators of the native engine: for each a plain torch reference, and faster backends that must agree with it."""
