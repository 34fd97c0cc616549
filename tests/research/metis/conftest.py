"""Golden results of the reference, and the inputs it had: cluster file, host file, synthetic profiles."""

import pytest

from tests.golden_option import golden, golden_folder
from tests.research.metis.cases import CaseFiles


@pytest.fixture(scope="session")
def case_files(request, tmp_path_factory) -> CaseFiles:
    """Files of the cases in the folder of `--golden`."""
    document = golden(request.config, "metis.json")
    return CaseFiles(tmp_path_factory.mktemp("golden"), document, golden_folder(request.config))


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """inputs(num_layers, devices_per_type) -> (host file, cluster file, profile folder), written once."""
    files = CaseFiles(tmp_path_factory.mktemp("metis"), {}, tmp_path_factory.getbasetemp())

    def make(num_layers: int, devices_per_type: int):
        return files.write(
            {"profile": f"gen_synth_data {num_layers} 128", "hostfile": f"gen_hostfile {devices_per_type}"}
        )

    return make
