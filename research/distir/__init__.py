"""DistIR (microsoft/dist-ir): its perceptron and GPT-2 steps, its rule sets and its notebook."""
