"""What `python benchmark.py` does: MFU tables, measured or predicted, the tuner's answers, link fits."""
