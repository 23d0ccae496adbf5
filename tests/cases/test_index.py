"""Every fault of the catalogue is tried: by its generated input, or by the test that the table below names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

# Fault -> file and function, for those without a generator.
BY_HAND = {
    "F013": ("formats/test_safetensors.py", "test_every_16_bit_and_8_bit_value_decodes_as_defined"),
    "F017": ("formats/test_safetensors_maps.py", "test_a_refused_map_falls_back_to_pread"),
    "F041": ("formats/test_imatrix.py", "test_refuses_values_that_are_no_mean_square"),
    "F042": ("quantize/test_kmeans.py", "test_zero_importance_means_uniform_and_the_floor_is_one_percent"),
    "F043": ("formats/test_imatrix.py", "test_an_expert_without_tokens_takes_the_mean_of_the_others"),
    "F047": ("formats/test_blocks.py", "test_values_that_do_not_fit_are_refused"),
    "F057": ("cases/test_command_line.py", "test_group_sizes_are_checked"),
    "F062": ("formats/test_packed_fp8.py", "test_blocks_do_not_reach_into_the_next_expert"),
    "F083": ("models/test_rope.py", "test_a_missing_key_is_named"),
    "F089": ("export/test_export_cbk_families.py", "test_gemma_by_hand"),
    "F096": ("quantize/test_ternary_search.py", "test_tensor_bytes_are_the_bytes_of_a_gguf_block"),
    "F097": ("formats/test_blocks.py", "test_sizes_and_ids"),
    "F099": ("formats/test_blocks.py", "test_every_byte_of_base_three_decodes_to_its_trits"),
    "F100": ("runtime/test_verify.py", "test_wrong_weights_are_found_without_checksums"),
    "F101": ("cases/test_command_line.py", "test_who_can_load_it_is_said"),
    "F109": ("cases/test_command_line.py", "test_keys_of_a_split_do_not_travel"),
    "F110": ("export/test_export_gguf.py", "test_ternary_types_are_lossless"),
    "F112": ("quantize/test_resume.py", "test_damaged_work_is_done_again"),
    "F114": ("quantize/test_resume.py", "test_disk_full"),
    "F116": ("cases/test_command_line.py", "test_an_output_is_never_positional"),
    "F117": ("cases/test_command_line.py", "test_a_second_export_replaces_the_whole_family"),
    "F118": ("quantize/test_resume.py", "test_two_processes_cannot_share_a_folder"),
    "F120": ("quantize/test_kmeans.py", "test_any_split_and_thread_count"),
    "F121": ("cli/test_progress.py", "test_a_log_has_a_line_a_tensor_and_no_carriage_return"),
    "F127": ("hub/test_push.py", "test_what_is_not_pushed"),
}
HUB = {f"F{n}" for n in (122, 123, 124, 125, 126, 128)}  # open_32 is a server: tests/hub has one of its own
OUT_OF_REACH = {"F129": "symbolic links on Windows, which is not supported"}


def catalogue(shared: Path) -> dict[str, str]:
    """Fault -> how its input is made, as the catalogue says."""
    text = (shared / "cases" / "README.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^- \*\*(F\d+)\*\*.*\n.*Gen: `(.*)`$", text, re.MULTILINE))


def test_every_fault_has_its_trial(shared: Path, repository: Path) -> None:
    faults = catalogue(shared)
    assert len(faults) >= 100
    generators = {p.stem[:7] for p in (shared / "cases").glob("open_*.py")}
    untried = []
    for fault, way in faults.items():
        made = set(re.findall(r"open_\d\d", way))
        by_case = bool(made) and made <= generators and made != {"open_32"}
        if not (by_case or fault in BY_HAND or fault in HUB or fault in OUT_OF_REACH):
            untried.append(f"{fault}: {way}")
    assert untried == []
    assert not BY_HAND.keys() - faults.keys()


@pytest.mark.parametrize(("file", "name"), sorted(set(BY_HAND.values())))
def test_the_named_test_is_there(repository: Path, file: str, name: str) -> None:
    tree = ast.parse((repository / "tests" / file).read_text(encoding="utf-8"))
    names = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    assert name in names


def test_the_hub_is_tried_against_its_real_client(repository: Path) -> None:
    for file in ("test_push.py", "test_download.py", "test_stream.py"):
        text = (repository / "tests" / "hub" / file).read_text(encoding="utf-8")
        for status in ("401", "403", "429", "503"):
            assert status in text, (file, status)
