"""The bytes that a program would need are read from either message of the compiler."""

import jax
import pytest

from mstrain.compiler.compile import DoesNotFit, compile_program, limit_bytes, needed_bytes
from mstrain.compiler.topology import Target
from mstrain.hardware import parse_target
from mstrain.mesh import make_mesh, parse_mesh
from mstrain.program.program import Program

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


class Refused(Program):
    """A program that no device holds; keeps the options that it is compiled with."""

    def compile(self, options=None):
        self.arguments[0].append(options)
        raise jax.errors.JaxRuntimeError(next(iter(MESSAGES)))


@pytest.mark.parametrize("options", [None, {}, {"xla_tpu_scoped_vmem_limit_kib": 1024}])
def test_given_options_reach_the_compiler_and_its_limit_is_said(options):
    tried, target = [], Target(parse_target("v5p-8"), make_mesh(parse_mesh("1x1")))
    with pytest.raises(DoesNotFit, match="step does not fit on v5p-8: .* 280.00 GiB of the 95.74 GiB") as error:
        compile_program(Refused("step", print, (tried,)), target, options)
    assert tried == [options] and error.value.needed == 280 * 2**30
