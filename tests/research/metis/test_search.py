"""Determinism, budgets, output and the order of the enumeration."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from itertools import islice, permutations, product

import pytest

from mstrain.json_files import write_json
from research.metis.groups import device_groups, merge_bundles, multiset_permutations
from research.metis.options import MetisOptions
from research.metis.result import SearchStopped, reference_lines
from research.metis.search import run_metis

OPTIONS = MetisOptions(num_layers=10, gbs=128, device_order=("V100", "A100"))
SCRIPT = """
import sys
from research.metis.options import MetisOptions
from research.metis.search import run_metis
result = run_metis(*sys.argv[1:], MetisOptions(num_layers=10, gbs=128))
print(result.count, result.sum_of_costs.hex(), result.ranking)
"""


def test_result_depends_neither_on_hash_seed_nor_on_directory_order(inputs, tmp_path):
    hostfile, clusterfile, profiles = inputs(10, 16)
    copy = tmp_path / "reversed"
    copy.mkdir()
    for path in sorted(profiles.iterdir(), reverse=True):
        shutil.copy(path, copy)
    outputs = set()
    run = {"check": True, "capture_output": True, "text": True}
    for seed, folder in (("0", profiles), ("1", copy)):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", SCRIPT, str(hostfile), str(clusterfile), str(folder)]
        outputs.add(subprocess.run(command, env=environment, **run).stdout)
    assert len(outputs) == 1 and outputs.pop().startswith("612 ")


def test_plan_budget_ends_the_search_and_keeps_what_was_found(inputs):
    whole = run_metis(*inputs(10, 16), replace(OPTIONS, top_k=1000))
    result = run_metis(*inputs(10, 16), replace(OPTIONS, top_k=1000, max_plans=20))
    assert result.exhausted and result.inter_stage_plans == 20
    assert 0 < result.plans_costed < whole.plans_costed and set(result.ranking) < set(whole.ranking)
    assert not whole.exhausted and whole.inter_stage_plans == 176


def test_time_budget_that_is_too_short_says_so(inputs):
    with pytest.raises(SearchStopped, match="raise max_seconds or max_plans") as stopped:
        run_metis(*inputs(10, 16), replace(OPTIONS, max_seconds=1e-9))
    assert stopped.value.partial.exhausted


def test_ranking_is_stable_and_holds_every_cost(inputs):
    result = run_metis(*inputs(10, 16), replace(OPTIONS, top_k=1000))
    costs = [plan.cost for plan in result.ranking]
    assert costs == sorted(costs) and len(costs) == result.plans_costed == 206
    assert math.isclose(math.fsum(costs), result.sum_of_costs, rel_tol=1e-12)
    assert run_metis(*inputs(10, 16), OPTIONS).ranking == result.ranking[:10]


def test_walks_differ_only_after_the_first_attempt_fails(inputs):
    naive = run_metis(*inputs(10, 16), OPTIONS)
    strat = run_metis(*inputs(10, 16), replace(OPTIONS, use_strat=True))
    assert naive.costed_by_attempt[0] == strat.costed_by_attempt[0] == 176
    assert naive.costed_by_attempt[1:] != strat.costed_by_attempt[1:]


def test_printed_lines_are_those_of_the_reference(inputs):
    result = run_metis(*inputs(10, 16), replace(OPTIONS, trials=2))
    time_line, count, header, best = reference_lines(result)
    assert time_line.startswith("Average time: ") and time_line.endswith(" ms")
    assert count == "count: 612"
    assert header == (
        "rank, cost, node_sequence, device_groups, strategies(dp_deg, tp_deg), "
        "batches(number of batch), layer_partition"
    )
    assert best == (
        "1, 1898.3743157594101, (<DeviceType.A100: 'a100'>, <DeviceType.V100: 'v100'>), "
        "[16, 16], [(16, 1), (16, 1)], 1, [0, 7, 10]"
    )


def test_json_holds_the_ranking_and_the_options(inputs, tmp_path):
    result = run_metis(*inputs(10, 16), OPTIONS)
    write_json(asdict(result), tmp_path / "metis.json")
    document = json.loads((tmp_path / "metis.json").read_text())
    assert document["count"] == 612 and document["options"]["gbs"] == 128
    assert [plan["cost"] for plan in document["ranking"]] == [plan.cost for plan in result.ranking]
    assert document["best_complete"]["layer_partition"] == [0, 3, 10]


@pytest.mark.parametrize("items", [[1], [2, 2], [1, 2], [3, 1, 2], [1, 1, 2, 2, 3], [(1, 1), (2,), (2,)]])
def test_arrangements_come_once_each_and_start_with_the_largest(items):
    arrangements = [tuple(arrangement) for arrangement in multiset_permutations(items)]
    assert Counter(arrangements) == Counter(set(permutations(items)))
    assert arrangements[0] == tuple(sorted(items, reverse=True))


@pytest.mark.parametrize("num_devices", [1, 6, 12, 16])
def test_groups_are_all_sums_of_large_enough_powers_of_two(num_devices):
    for stages in range(1, num_devices + 1):
        shapes = [2**power for power in range(5) if num_devices // stages <= 2**power <= num_devices]
        if len(shapes) ** stages > 1e5:
            continue
        expected = {sizes for sizes in product(shapes, repeat=stages) if sum(sizes) == num_devices}
        groups = list(device_groups(num_devices, stages, variance=1, max_permute_len=99))
        assert len(groups) == len(expected) and set(groups) == expected


def test_without_a_least_share_every_sum_is_tried_until_the_budget_ends(inputs):
    groups = list(device_groups(8, 3, variance=0, max_permute_len=99))
    expected = {sizes for sizes in product([1, 2, 4, 8], repeat=3) if sum(sizes) == 8}
    assert len(groups) == len(expected) and set(groups) == expected
    result = run_metis(*inputs(10, 16), replace(OPTIONS, min_group_scale_variance=0, max_plans=1000))
    assert result.exhausted and result.inter_stage_plans == 1000 and result.ranking


def test_groups_of_a_large_odd_cluster_come_without_delay():
    assert len(list(islice(device_groups(4097, 90, 1, 8), 100))) == 0  # every size allowed is even
    assert len(list(islice(device_groups(1024, 120, 1, 200), 100))) == 100


def test_long_lists_are_permuted_in_merged_bundles():
    assert merge_bundles([(1,)] * 4, limit=2) == [(1, 1), (1, 1)]
    assert merge_bundles([(1,)] * 4 + [(4,)], limit=3) == [(1, 1), (1, 1), (4,)]
    assert merge_bundles([(1,), (2,), (4,)], limit=2) == [(1,), (2,), (4,)]
    merged = list(device_groups(10, 8, variance=1, max_permute_len=6))
    assert 0 < len(merged) < len(list(device_groups(10, 8, variance=1, max_permute_len=99)))
    assert all(len(group) == 8 and sum(group) == 10 for group in merged)
