"""Plans parallel training for a cluster: python plan.py [key=value ...]; --help lists the keys."""

from mstrain.cli import run_command


def main(arguments: list[str]) -> int:
    from mstrain.planning.commands import run

    return run(arguments)


def help_lines(arguments: list[str]) -> list[str]:
    from mstrain.planning.commands import help_lines

    return help_lines(arguments)


if __name__ == "__main__":
    run_command("plan", main, help_lines)
