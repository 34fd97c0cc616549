"""Trains a transformer on a mesh: python train.py [key=value ...]; --help lists the keys."""

from mstrain.cli import run_command


def main(arguments: list[str]) -> int:
    from mstrain.commands import train

    return train.main(arguments)


def help_lines(arguments: list[str]) -> list[str]:
    from mstrain.commands import train

    return train.help_lines(arguments)


if __name__ == "__main__":
    run_command("train", main, help_lines)
