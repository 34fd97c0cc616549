"""The file that carries a plan from plan.py to train.py: which keys of train.py run it, or why none do."""

from pathlib import Path

from mstrain.json_files import parse_json

KEYS = ("mesh", "parallel", "parallel.slices", "accumulate", "remat")  # of train.py, that a file may supply


def plan_overrides(arguments: list[str]) -> list[str]:
    """Arguments that `plan=FILE` among `arguments` stands for, without those given on the command line.

    Raises ValueError for a file that is not a plan, one that train.py cannot run, and one made for another
    model.
    """
    given = {key: value for key, _, value in (argument.partition("=") for argument in arguments)}
    if given.get("plan") in (None, "null"):
        return []
    path = given["plan"]
    document = _read(path)
    if document.get("train") is None:
        why = document.get("why_not_trainable") or "it holds no plan for train.py"
        raise ValueError(f"plan={path}: {why}. Type pipeline=1 to plan.py, with a cluster= that is large enough.")
    keys = document["train"]
    unknown = sorted(set(keys) - set(KEYS))
    if unknown:
        raise ValueError(
            f"plan={path}: {unknown[0]!r} is not for a plan. It may hold {', '.join(KEYS)}; run plan.py again."
        )
    if given.get("model") != document["model"]:
        raise ValueError(f"plan={path} was made for model {document['model']}. Type model={document['model']}.")
    return [f"{key}={value}" for key, value in keys.items() if key not in given]


def _read(path: str) -> dict:
    try:
        document = parse_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"plan={path}: {error.strerror}. Type the path of a plan.json that plan.py wrote.") from None
    except ValueError as error:
        raise ValueError(f"plan={path}: not JSON ({error}). Run plan.py again.") from None
    if (
        not isinstance(document, dict)
        or not isinstance(document.get("train", {}), dict | None)
        or "model" not in document
    ):
        raise ValueError(f"plan={path}: not a plan.json of plan.py. Run plan.py again and type its plan.json.")
    return document
