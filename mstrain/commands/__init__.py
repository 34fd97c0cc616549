"""The commands: key=value arguments in, exit code out. Each imports what it needs when it runs."""

COMMANDS = ("train", "benchmark", "plan")
