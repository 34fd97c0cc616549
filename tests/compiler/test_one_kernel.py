"""The trial kernel of docs/performance.md still compiles; skipped where libtpu is missing."""

import pytest

from tests.compiler.one_kernel import compile_for

pytestmark = pytest.mark.usefixtures("tpu_compiler")


@pytest.mark.parametrize("name", ["v5p-64", "v6e-32"])
def test_the_kernel_compiles_for_one_and_two_cores(name, capsys):
    compile_for(name, "4x8", (4096, 4096, 4096), 2)
    assert "compiled" in capsys.readouterr().out
