"""Hugging Face folders in and out: one table per family serves both directions."""
