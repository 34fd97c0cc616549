"""What `python benchmark.py` does: MFU tables measured on the devices present or predicted for absent ones,
link fits."""
