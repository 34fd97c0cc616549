"""A token file gives back what was written, or says what is wrong with it."""

import numpy as np
import pytest

from mstrain.data import TokenFile


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


def test_bits_per_byte_of_a_uniform_guess_over_bytes(make_file):
    file = make_file(np.zeros(1000), 256, text_bytes=4000)
    assert file.bytes_per_token == 4.0
    assert file.bits_per_byte(np.log(256)) == pytest.approx(2.0)
    textless = make_file(np.zeros(10))
    assert textless.bits_per_byte(1.0) is None and textless.bytes_per_token is None


@pytest.mark.parametrize("damage, message", [
    (lambda data: data[:-1], "header promises"),
    (lambda data: data + b"\0", "header promises"),
    (lambda data: data[:4096], "header promises"),
    (lambda data: data[:100], "not an mstrain token file"),
    (lambda data: b"", "not an mstrain token file"),
    (lambda data: np.arange(9000, dtype=np.uint16).tobytes(), "not an mstrain token file"),
    (lambda data: b" " * 4096 + data[4096:], "not an mstrain token file"),
    (lambda data: b"[" * 4096, "not an mstrain token file"),
    (lambda data: data.replace(b'"version": 1', b'"version": 2'), "not an mstrain token file"),
    (lambda data: data.replace(b'"num_tokens": 100', b'"num_tokens": -10'), "not an mstrain token file"),
    (lambda data: data.replace(b'"uint16"', b'"object"'), "not an mstrain token file"),
])
def test_a_damaged_or_foreign_file_is_named_with_the_fix(make_file, damage, message):
    path = make_file(np.arange(100)).path
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=message) as error:
        TokenFile.open(path)
    assert str(path) in str(error.value) and "delete its folder" in str(error.value)


def test_a_missing_file_is_a_value_error(tmp_path):
    with pytest.raises(ValueError, match="cannot read token file"):
        TokenFile.open(tmp_path / "train.bin")
