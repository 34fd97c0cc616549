"""The folder of the configuration: an installed package carries it inside, a checkout has it beside the package."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
CONF = next(folder for folder in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if folder.is_dir())
