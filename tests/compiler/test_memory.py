"""Which memory is exhausted, the bytes that are needed and the limit are read from every message of the compiler."""

import jax
import pytest

from mstrain.compiler.compile import DoesNotFit, OutOfScratch, compile_program
from mstrain.compiler.topology import Target
from mstrain.hardware import parse_target
from mstrain.mesh import make_mesh, parse_mesh
from mstrain.program.exhausted import read_exhausted
from mstrain.program.program import Program

HBM_ERROR = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (280.00G) "
    "exceeds available HBM (95.74G)."
)
VMEM_ERROR = (  # libtpu 0.0.42.1, the instruction shortened
    "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:\nRan out of memory in memory space vmem while allocating on "
    "stack for %splash_mha_fwd_residuals.1 = (f32[4,1024,128]{2,1,0:T(8,128)}) custom-call(%copy-done.46), "
    'custom_call_target="tpu_custom_call". Scoped allocation with size 8.78M and limit 8.00M exceeded scoped vmem '
    "limit by 796.0K. It should not be possible to run out of scoped vmem - \nSee "
    "https://openxla.org/xla/errors/error_1001 for more details."
)
MESSAGES = {
    HBM_ERROR: ("hbm", 280 * 2**30, 95.74 * 2**30),
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 98.50G of 95.74G hbm. Exceeded hbm "
    "capacity by 2.76G.": ("hbm", 98.5 * 2**30, 95.74 * 2**30),
    VMEM_ERROR: ("vmem", 8.78 * 2**20, 8 * 2**20),
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 98.50M of 64.00M vmem.": (
        "vmem", 98.5 * 2**20, 64 * 2**20
    ),
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 280 bytes.": ("hbm", None, None),
    "INTERNAL: Ran out of memory on HBM (95.74G).": None,
}  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES)
def test_the_memory_its_amount_and_limit_are_read(message):
    assert read_exhausted(jax.errors.JaxRuntimeError(message)) == MESSAGES[message]


class Refused(Program):
    """A program that no device holds, by the message of its arguments; keeps the options that it is compiled with."""

    def compile(self, options=None):
        tried, message = self.arguments
        tried.append(options)
        raise jax.errors.JaxRuntimeError(message)


@pytest.mark.parametrize("options", [None, {}, {"xla_tpu_scoped_vmem_limit_kib": 1024}])
def test_given_options_reach_the_compiler_and_its_limit_is_said(options):
    tried, target = [], Target(parse_target("v5p-8"), make_mesh(parse_mesh("1x1")))
    with pytest.raises(DoesNotFit, match="step does not fit on v5p-8: .* 280.00 GiB of the 95.74 GiB") as error:
        compile_program(Refused("step", print, (tried, HBM_ERROR)), target, options)
    assert tried == [options] and (error.value.needed, error.value.limit) == (280 * 2**30, 95.74 * 2**30)


def test_a_kernel_without_vmem_does_not_ask_for_hbm():
    target = Target(parse_target("v5p-8"), make_mesh(parse_mesh("1x1")))
    says = "kernel needs 8.78 MiB of the 8.00 MiB of VMEM .* Raise xla_tpu_scoped_vmem_limit_kib to 9216."
    with pytest.raises(OutOfScratch, match=says) as error:
        compile_program(Refused("step", print, ([], VMEM_ERROR)), target)
    assert "GiB" not in str(error.value) and "remat" not in str(error.value)
