"""DistIR (microsoft/dist-ir) reproduced: its training step of a perceptron, its cost rules and its notebook."""
