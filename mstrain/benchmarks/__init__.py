"""The command `python benchmark.py`: MFU tables, measured or predicted; rankings of meshes; fits of links."""
