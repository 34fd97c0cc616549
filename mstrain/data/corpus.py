"""Makes the token files of a config once. Later runs with the same text, tokenizer and split use the same files.

Files are in `cache_dir/<fingerprint>/`: train.bin, validation.bin, corpus.json (warnings) and, unless the
tokenizer is bytes, tokenizer.json. They are written into a temporary folder and appear by one rename: a
killed run leaves at most a `.tmp-*` folder that nothing reads, and of several processes that prepare at once
the first rename wins. A damaged folder is tokenized again, with a warning; `verification` describes when damage of
the tokens is detected.
"""

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from mstrain.data.config import DataConfig
from mstrain.data.documents import text_digest
from mstrain.data.recipes import Recipe, synthetic_recipe, text_recipe
from mstrain.data.split import TRAIN, VALIDATION
from mstrain.data.token_file import TokenFile
from mstrain.data.tokenizers import TOKENIZER_FILE, Tokenizer, load_tokenizer
from mstrain.data.verification import Verification, remove_folder


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Both splits of a prepared corpus."""

    train: TokenFile
    validation: TokenFile
    tokenizer: Tokenizer | None
    """None for the synthetic source, whose tokens do not represent text."""
    directory: Path
    warnings: tuple[str, ...]
    """What was skipped or repaired, one sentence each; the same list on every later run."""
    revisions: dict[str, str]
    """Commits on the Hugging Face Hub of what came from there: {"data": COMMIT, "tokenizer": COMMIT}, or fewer."""
    verification: Verification
    """`verification.wait()` returns once the tokens are verified against `digest`; raises DamagedTokens otherwise."""

    @property
    def vocab_size(self) -> int:
        return self.train.vocab_size

    @property
    def digest(self) -> str:
        """Identity of the tokens: compare it on resume and between hosts; it ignores file times and paths."""
        return _digest(self.train, self.validation)


def prepare(
    config: DataConfig,
    tokenizer: str = "bytes",
    seed: int = 0,
    vocab_size: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Corpus:
    """Token files of the corpus, made now or found in the cache.

    `tokenizer` is bytes, bpe, a tokenizer.json file or a Hugging Face name. `vocab_size` is for bpe (None:
    8192) and for the synthetic source (None: 256), the only reader of `seed`. `on_progress` gets the bytes of
    text (synthetic: tokens) done so far. Raises ValueError with what to type instead.
    """
    if config.source == "synthetic":
        recipe = synthetic_recipe(config, tokenizer, seed, vocab_size)
    else:
        recipe = text_recipe(config, tokenizer, vocab_size)
    cache = Path(config.cache_dir).expanduser()
    directory = cache / recipe.fingerprint
    repaired = []
    if os.path.lexists(directory):
        try:
            return _open(directory, recipe)
        except ValueError as error:
            repaired = [f"tokenized again, because the cached files were damaged ({error})"]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".tmp-{recipe.fingerprint}-", dir=cache))
    except OSError as error:
        raise ValueError(
            f"cannot write to data.cache_dir={config.cache_dir} ({error}): type data.cache_dir= of a writable folder"
        ) from None
    try:
        warnings = recipe.write(temporary, on_progress or (lambda done: None))
        _finish(temporary, warnings + repaired, recipe)
        _publish(temporary, directory, recipe)
    except OSError as error:
        raise ValueError(
            f"cannot write token files to data.cache_dir={config.cache_dir} ({error}): free "
            "some room, or type data.cache_dir= of another folder"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return _open(directory, recipe)


def _finish(folder: Path, warnings: list[str], recipe: Recipe) -> None:
    """Writes corpus.json of complete token files; raises ValueError when a split is too small to use."""
    files = [TokenFile.open(folder / f"{side}.bin") for side in (TRAIN, VALIDATION)]
    for side, file in zip((TRAIN, VALIDATION), files, strict=True):
        if file.num_tokens < 2:
            raise ValueError(
                f"the {side} split holds {file.num_tokens} tokens: give more text, or a larger "
                "data.validation_fraction="
            )
    tokenizer = _tokenizer(folder, recipe)
    facts = {
        "corpus": recipe.fingerprint,
        "warnings": warnings,
        "tokens": _digest(*files),
        "tokenizer": tokenizer and tokenizer.digest,
        "revisions": recipe.revisions,
    }
    (folder / "corpus.json").write_text(json.dumps(facts))


def _publish(temporary: Path, directory: Path, recipe: Recipe) -> None:
    """Rename into place, unless another process has already put a sound folder there."""
    os.chmod(temporary, 0o755)  # mkdtemp makes it private, but a cache may be shared
    if os.path.lexists(directory):
        try:
            _open(directory, recipe).verification.wait()
            return
        except ValueError:
            remove_folder(directory)
    try:
        os.replace(temporary, directory)
    except OSError:
        if not directory.exists():
            raise


def _open(directory: Path, recipe: Recipe) -> Corpus:
    """Raises ValueError when any file of the folder is missing or damaged; large ones are verified later."""
    try:
        facts = json.loads((directory / "corpus.json").read_text())
        warnings, tokens, tokenizer_digest = facts["warnings"], facts["tokens"], facts["tokenizer"]
        sound = isinstance(warnings, list) and all(isinstance(warning, str) for warning in warnings)
        sound = sound and facts["corpus"] == recipe.fingerprint
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        sound = False
    if not sound:
        raise ValueError(f"{directory / 'corpus.json'} is missing, broken or of another corpus: delete {directory}")
    tokenizer = _tokenizer(directory, recipe)
    if (tokenizer and tokenizer.digest) != tokenizer_digest:
        raise ValueError(f"{directory / TOKENIZER_FILE} is not the tokenizer of this corpus: delete {directory}")
    train, validation = (TokenFile.open(directory / f"{side}.bin") for side in (TRAIN, VALIDATION))
    if _digest(train, validation) != tokens:
        raise ValueError(f"{train.path} and {validation.path.name} are not those of this corpus: delete {directory}")
    verification = Verification((train, validation), directory.parent)
    if not verification.in_background:
        verification.wait()
    return Corpus(train, validation, tokenizer, directory, tuple(warnings), recipe.revisions, verification)


def _tokenizer(folder: Path, recipe: Recipe) -> Tokenizer | None:
    return load_tokenizer(str(folder / TOKENIZER_FILE)) if recipe.trains_tokenizer else recipe.tokenizer


def _digest(train: TokenFile, validation: TokenFile) -> str:
    return text_digest(train.digest, validation.digest)
