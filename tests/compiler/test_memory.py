"""The bytes that a program would need are read from either message of the compiler."""

import pytest

from mstrain.compiler.compile import limit_bytes, needed_bytes

MESSAGES = {
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (280.00G) "
    "exceeds available HBM (95.74G).": 280 * 2**30,
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 98.50G of 95.74G hbm. Exceeded hbm "
    "capacity by 2.76G.": 98.5 * 2**30,
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 98.50M of 64.00M vmem.": None,
    "RESOURCE_EXHAUSTED: ": None,
}


@pytest.mark.parametrize("message", MESSAGES)
def test_the_amount_is_read(message):
    assert needed_bytes(message) == MESSAGES[message]


@pytest.mark.parametrize("message", MESSAGES)
def test_the_limit_is_read_beside_it(message):
    assert limit_bytes(message) == (95.74 * 2**30 if MESSAGES[message] else None)
