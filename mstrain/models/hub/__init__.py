"""Reads and writes Hugging Face folders; one table per family serves both directions."""
