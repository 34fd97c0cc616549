"""A token file gives back what was written, or says what is wrong with it."""

import gc
import json
import os
import shutil

import numpy as np
import pytest

from mstrain.data import Batches, TokenFile
from mstrain.data.token_header import encode_header, parse_header
from tests.descriptors import descriptors


@pytest.mark.parametrize("vocab_size, dtype", [(256, np.uint16), (65536, np.uint16), (65537, np.uint32)])
def test_round_trip_in_the_smallest_dtype_that_holds_the_vocabulary(make_file, vocab_size, dtype):
    ids = np.random.default_rng(0).integers(0, vocab_size, 5000)
    ids[-1] = vocab_size - 1
    file = make_file(ids, vocab_size, text_bytes=12345)
    assert file.read().dtype == dtype
    np.testing.assert_array_equal(file.read(), ids)
    assert (file.num_tokens, file.vocab_size, file.text_bytes) == (5000, vocab_size, 12345)


def test_digest_is_of_the_tokens(make_file):
    first, same = make_file([1, 2], name="a"), make_file([1, 2], name="b")
    other = make_file([2, 1], name="c")
    assert first.digest == same.digest != other.digest
    wide = make_file([1 | 2 << 16], 1 << 17, name="d")  # the same bytes as uint32
    assert wide.digest != first.digest and wide.hash_tokens() == wide.digest


def test_bits_per_byte_of_a_uniform_guess_over_bytes(make_file):
    file = make_file(np.zeros(1000), 256, text_bytes=4000)
    assert file.bits_per_byte(np.log(256)) == pytest.approx(2.0)
    textless = make_file(np.zeros(10))
    assert textless.bits_per_byte(1.0) is None


def with_header(data, **changes):
    """The file with other header fields, and the checksum that belongs to them."""
    fields = {key: value for key, value in json.loads(data[:4096]).items() if key != "checksum"}
    return encode_header(fields | changes) + data[4096:]


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda data: data[:-1], "its header states"),
        (lambda data: data + b"\0", "its header states"),
        (lambda data: data[:4096], "its header states"),
        (lambda data: data[:100], "not an mstrain token file"),
        (lambda data: b"", "not an mstrain token file"),
        (lambda data: np.arange(9000, dtype=np.uint16).tobytes(), "not an mstrain token file"),
        (lambda data: b" " * 4096 + data[4096:], "not an mstrain token file"),
        (lambda data: b"[" * 4096, "not an mstrain token file"),
        (lambda data: data.replace(b'"version": 2', b'"version": 1'), "not an mstrain token file"),
        (lambda data: with_header(data, num_tokens=-10), "not an mstrain token file"),
        (lambda data: with_header(data, num_tokens=2**70), "not an mstrain token file"),
        (lambda data: with_header(data, num_tokens="100"), "not an mstrain token file"),
        (lambda data: with_header(data, vocab_size=0), "not an mstrain token file"),
        (lambda data: with_header(data, dtype="object"), "not an mstrain token file"),
        (lambda data: with_header(data, num_tokens=2**61), "its header states"),
    ],
)
def test_a_damaged_or_foreign_file_is_named_with_the_fix(make_file, damage, message):
    path = make_file(np.arange(100)).path
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=message) as error:
        TokenFile.open(path)
    assert str(path) in str(error.value) and "delete its folder" in str(error.value)


def test_a_missing_file_is_a_value_error(tmp_path):
    with pytest.raises(ValueError, match="cannot read token file"):
        TokenFile.open(tmp_path / "train.bin")


@pytest.mark.parametrize(
    "make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path), lambda path: os.symlink("nowhere", path)]
)
def test_what_is_not_a_regular_file_is_refused_at_once(tmp_path, make):
    path = tmp_path / "train.bin"
    make(path)
    with pytest.raises(ValueError, match=str(path)):
        TokenFile.open(path)


def test_every_bit_of_the_header_matters(make_file):
    data = make_file(np.arange(100)).path.read_bytes()[:4096]
    assert parse_header(data)["num_tokens"] == 100
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert parse_header(bytes(flipped)) is None, f"bit {bit}"


def shrink(path):
    os.truncate(path, 5000)


def write_in_place(path):
    with open(path, "r+b") as file:
        file.seek(6000)
        file.write(b"x")


def replace(path):
    shutil.copy(path, path.with_name("other"))
    os.replace(path.with_name("other"), path)


@pytest.mark.parametrize("change, how", [(shrink, "truncated"), (write_in_place, "written to"), (replace, "replaced")])
def test_a_file_that_changes_while_it_is_read_is_an_error_with_its_name(make_file, change, how):
    path = make_file(np.arange(3000)).path
    os.utime(path, (1, 1))
    file = TokenFile.open(path)
    batches = Batches(file, 10, 4, shuffle=False)
    batches.batch(0)
    change(path)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"token file {file.path} was {how}"):
            batches.batch(0)


@pytest.mark.parametrize("harmless", [os.unlink, lambda path: os.chmod(path, 0o600)])
def test_a_file_that_is_removed_or_chmodded_is_read_on(make_file, harmless):
    file = make_file(np.arange(3000))
    harmless(file.path)
    np.testing.assert_array_equal(Batches(file, 10, 4, shuffle=False).batch(1).tokens[0], np.arange(40, 51))


def test_descriptors_are_closed_with_their_files(make_file):
    path = make_file(np.arange(100)).path
    gc.collect()
    files = [TokenFile.open(path) for _ in range(5)]
    assert list(descriptors()).count(str(path)) == 5
    del files
    gc.collect()
    assert str(path) not in descriptors()
