"""Trains a transformer on a mesh: python train.py [key=value ...]; --help lists the keys."""

from mstrain.config import run_command


def main(arguments: list[str]) -> int:
    if arguments == ["model=list"]:
        from mstrain.models.zoo import print_zoo

        return print_zoo()
    from mstrain.config import load_config
    from mstrain.training.run import prepare

    return prepare(load_config(arguments)).train()


if __name__ == "__main__":
    run_command("train", main)
