"""Engines behind one small interface (`base`), one module or package each."""
