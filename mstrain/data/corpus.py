"""Makes the token files of a config once. Later runs with the same text, tokenizer and split use the same files.

Files are in `cache_dir/<fingerprint>/`: train.bin, validation.bin (for conversations train.marks and validation.marks
too), corpus.json (warnings) and the tokenizer's files. They are written into `cache_dir/.tmp-<fingerprint>`, which one
process holds locked, and appear by one rename. A killed process leaves that folder, and the next one continues there;
others wait and use the result. A damaged folder is tokenized again, with a warning; `verification` describes when
damage of the tokens is detected. Files of data=tokens are read where they are and never changed.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mstrain.data.batches import Batches
from mstrain.data.config import DataConfig
from mstrain.data.documents import text_digest
from mstrain.data.joined import JoinedTokens, open_flat_tokens
from mstrain.data.listing import listing
from mstrain.data.mixture import MixedBatches, MixedTokens
from mstrain.data.recipes import Recipe, split_files, synthetic_recipe, text_recipe
from mstrain.data.split import TRAIN, VALIDATION
from mstrain.data.stream import Stream, StreamedBatches
from mstrain.data.token_file import TokenFile
from mstrain.data.tokenizers import TOKENIZER_FILE, Tokenizer, describe_marks, load_tokenizer, marked, tokenizer_file
from mstrain.data.verification import Verification, remove_folder
from mstrain.data.writing import Progress


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Both splits of a prepared corpus."""

    train: Any
    """A TokenFile, or what is read like one: JoinedTokens or MixedTokens."""
    validation: Any
    tokenizer: Tokenizer | None
    """None for the synthetic source, whose tokens do not represent text, and for tokens of an unknown tokenizer."""
    directory: Path
    warnings: tuple[str, ...]
    """What was skipped or repaired, one sentence each; the same list on every later run."""
    revisions: dict[str, str]
    """Commits on the Hugging Face Hub of what came from there: {"data": COMMIT, "tokenizer": COMMIT}, or fewer."""
    verification: Any
    """`verification.wait()` returns once the tokens are verified against `digest`; raises DamagedTokens otherwise."""
    digest: str
    """Identity of the tokens: compare it on resume and between hosts; it ignores file times and paths."""
    parts: tuple["Corpus", ...] = ()
    """The corpora of a mixture."""
    stream: Stream | None = None
    """The windows of a corpus larger than the disk; `train` is then the first one."""

    @property
    def described(self) -> str:
        """How documents begin and end."""
        return describe_marks(self.tokenizer) if self.tokenizer else "documents are not marked"

    @property
    def vocab_size(self) -> int:
        return self.train.vocab_size

    def batches(self, side: str, seq: int, batch: int, seed: int = 0, pack: str = "auto") -> Any:
        """Batches of `train` or `validation`. `auto` packs conversations as segments and concatenates the rest."""
        if self.parts:
            each = [part.batches(side, seq, batch, seed, pack) for part in self.parts]
            return MixedBatches(each, self.train.weights, seed)
        if self.stream and side == TRAIN:
            return StreamedBatches(self.stream, seq, batch, seed, pack)
        return Batches(getattr(self, side), seq, batch, seed, pack=self.pack(pack))

    def pack(self, pack: str) -> str:
        """How documents share a row: `pack`, where `auto` is segments for conversations and concat for the rest."""
        return ("segments" if self.train.marks else "concat") if pack == "auto" else pack


def prepare(
    config: DataConfig,
    tokenizer: str = "bytes",
    seed: int = 0,
    vocab_size: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Corpus:
    """Token files of the corpus, made now or found in the cache.

    `tokenizer` is bytes, bpe, a file or folder, or a Hugging Face name. `vocab_size` is for bpe (None: 8192), for the
    synthetic source (None: 256), the only reader of `seed`, and for data=tokens without a tokenizer. Raises ValueError
    with what to type instead.
    """
    on_progress = on_progress or (lambda progress: None)
    if config.mixture:
        return _mixed(config, tokenizer, seed, vocab_size, on_progress)
    if config.source == "tokens":
        return _flat(config, tokenizer, vocab_size)
    if config.window:
        return _streamed(config, tokenizer, seed, on_progress)
    if config.source == "synthetic":
        return _made(synthetic_recipe(config, tokenizer, seed, vocab_size), config, on_progress)
    return _made(text_recipe(config, tokenizer, vocab_size), config, on_progress)


def _made(recipe: Recipe, config: DataConfig, on_progress: Callable[[Progress], None]) -> Corpus:
    """The corpus of a recipe, from the cache or made now."""
    cache = Path(config.cache_dir).expanduser()
    directory, repaired = cache / recipe.fingerprint, []
    try:
        with contextlib.suppress(FileNotFoundError):
            return _open(directory, recipe)
    except ValueError as error:
        repaired = [f"tokenized again, because the cached files were damaged ({error})"]
    with _claimed(config.cache_dir, cache, recipe.fingerprint) as temporary:
        if not repaired:  # another process may have finished while this one waited
            with contextlib.suppress(FileNotFoundError, ValueError):
                return _open(directory, recipe)
        try:
            warnings = recipe.write(temporary, on_progress)
            _finish(temporary, warnings + repaired, recipe, config)
            _publish(temporary, directory, recipe)
        except OSError as error:
            raise ValueError(
                f"cannot write token files to data.cache_dir={config.cache_dir} ({error}): free "
                "some room, or type data.cache_dir= of another folder"
            ) from None
    return _open(directory, recipe)


def _streamed(config: DataConfig, tokenizer: str, seed: int, on_progress: Callable[[Progress], None]) -> Corpus:
    if tokenizer == "bpe":
        raise ValueError("tokenizer=bpe is trained on a whole corpus, not on data.window: type tokenizer=FILE of one")
    files, held_out, _ = split_files(config)
    if held_out is None:
        raise ValueError("data.window cannot hold out validation data: add data.validation=PATH")
    cache = Path(config.cache_dir).expanduser()

    def make(names: tuple[str, ...]) -> Corpus:
        return _made(text_recipe(config, tokenizer, None, names), config, on_progress)

    # A run that stopped because too many lines were skipped continues with another data.max_skipped.
    identity = text_recipe(dataclasses.replace(config, max_skipped=DataConfig.max_skipped), tokenizer, None).fingerprint
    stream = Stream(files.names, config.window or 1, identity, cache, make)
    first = stream.corpus(seed, 0)
    return dataclasses.replace(first, stream=stream, digest=text_digest("stream", identity))


def _mixed(
    config: DataConfig, tokenizer: str, seed: int, vocab_size: int | None, on_progress: Callable[[Progress], None]
) -> Corpus:
    if tokenizer == "bpe":
        raise ValueError("tokenizer=bpe is trained on one corpus, not on data.mixture: type tokenizer=FILE of one")
    for part, _ in config.parts:  # before the first one is tokenized
        listing(str(part.path), ("",), "data.mixture")
    parts = [prepare(part, tokenizer, seed, vocab_size, on_progress) for part, _ in config.parts]
    weights = [weight for _, weight in config.parts]
    train, validation = (MixedTokens([getattr(part, side) for part in parts], weights) for side in (TRAIN, VALIDATION))
    warnings = [
        f"{part.path}: {warning}" for (part, _), corpus in zip(config.parts, parts) for warning in corpus.warnings
    ]
    digest = text_digest("mixture", *(f"{part.digest} {weight:.6f}" for part, weight in zip(parts, weights)))
    verification = _AllVerified([part.verification for part in parts])
    return Corpus(
        train, validation, parts[0].tokenizer, parts[0].directory, tuple(warnings), parts[0].revisions, verification,
        digest, tuple(parts),
    )  # fmt: skip


class _AllVerified:
    """The verification of all parts of a mixture."""

    def __init__(self, parts: list):
        self._parts = parts

    def wait(self) -> None:
        for part in self._parts:
            part.wait()


def _flat(config: DataConfig, spec: str, vocab_size: int | None) -> Corpus:
    if spec == "bpe":
        raise ValueError(
            "tokenizer=bpe has no effect with data=tokens, which has no text: type tokenizer=FILE or vocab_size="
        )
    known = load_tokenizer(spec) if config.has_tokenizer(spec) else None
    if known is None and vocab_size is None:
        raise ValueError(
            "data=tokens needs the size of the vocabulary: type vocab_size=50257 (that of GPT-2), or "
            "tokenizer=FILE of the tokenizer that made them"
        )
    if known and vocab_size not in (None, known.vocab_size):
        raise ValueError(f"vocab_size={vocab_size} has no effect with tokenizer={spec}, which has its own: remove it")
    if config.eos.isdecimal():
        eod = int(config.eos)
    else:
        if known:
            marked(known, "none", config.eos)
        elif config.eos not in ("auto", "none"):
            raise ValueError(
                f"data.eos={config.eos} needs a tokenizer: type the number of the token, or tokenizer=FILE"
            )
        eod = known.eod if known else None
    size = known.vocab_size if known else int(vocab_size or 0)
    if eod is not None and eod >= size:
        raise ValueError(
            f"data.eos={eod} is outside the vocabulary of {size}, so it ends no document: type the number of the token "
            "that does"
        )
    files, train, validation = open_flat_tokens(config, size, eod)
    sides = JoinedTokens(train), JoinedTokens(validation)
    verification = Verification(files, Path(config.cache_dir).expanduser(), ours=False)
    digest = text_digest(*(side.digest for side in sides))
    return Corpus(*sides, known, files[0].path.parent, (), {}, verification, digest)


@contextlib.contextmanager
def _claimed(name: str, cache: Path, fingerprint: str) -> Iterator[Path]:
    """The folder in which this process alone makes a corpus, perhaps with what a killed one left.

    Waits for a process that has it. The folder is removed at the end, unless the process is killed or interrupted.
    Raises ValueError when it cannot be made.
    """
    folder = cache / f".tmp-{fingerprint}"
    while True:
        made = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            made = True
            descriptor = os.open(folder, os.O_RDONLY)
        except OSError as error:
            if made and isinstance(error, FileNotFoundError):  # its holder has just finished
                continue
            raise ValueError(
                f"cannot write to data.cache_dir={name} ({error}): type data.cache_dir= of a writable folder"
            ) from None
        try:
            with contextlib.suppress(OSError):  # a file system without locks: the first rename wins
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            try:
                if not os.path.samestat(os.stat(folder), os.fstat(descriptor)):
                    continue
            except FileNotFoundError:
                continue
            try:
                yield folder
            except KeyboardInterrupt:
                raise
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            shutil.rmtree(folder, ignore_errors=True)
            return
        finally:
            os.close(descriptor)


def _finish(folder: Path, warnings: list[str], recipe: Recipe, config: DataConfig) -> None:
    """Writes corpus.json of complete token files; raises ValueError when a split is too small to use."""
    files = [TokenFile.open(folder / f"{side}.bin") for side in (TRAIN, VALIDATION)]
    for side, file in zip((TRAIN, VALIDATION), files, strict=True):
        if file.num_tokens < 2:
            fix = "data.validation= of a longer one" if config.validation else "a larger data.validation_fraction="
            raise ValueError(f"the {side} split holds {file.num_tokens} tokens: give more text, or type {fix}")
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
    """Raises FileNotFoundError for a missing folder, and ValueError when any file of it is missing or damaged;
    large ones are verified later.
    """
    if not os.path.lexists(directory):
        raise FileNotFoundError(directory)
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
    eod = tokenizer.eod if tokenizer else None
    train, validation = (TokenFile.open(directory / f"{side}.bin", eod) for side in (TRAIN, VALIDATION))
    digest = _digest(train, validation)
    if digest != tokens:
        raise ValueError(f"{train.path} and {validation.path.name} are not those of this corpus: delete {directory}")
    verification = Verification((train, validation), directory.parent)
    if not verification.in_background:
        verification.wait()
    return Corpus(train, validation, tokenizer, directory, tuple(warnings), recipe.revisions, verification, digest)


def _tokenizer(folder: Path, recipe: Recipe) -> Tokenizer | None:
    if not recipe.trains_tokenizer:
        return recipe.tokenizer
    tokenizer = load_tokenizer(str(tokenizer_file(folder) or folder / TOKENIZER_FILE))
    marked(tokenizer, *recipe.marks)
    return tokenizer


def _digest(train: TokenFile, validation: TokenFile) -> str:
    marks = [file.marks.digest for file in (train, validation) if file.marks]
    return text_digest(train.digest, validation.digest, *marks)
