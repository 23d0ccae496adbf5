"""Models that a card cannot run are refused in one sentence, before a weight is read; no card is needed to say so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import trapetum
from trapetum.errors import KernelUnavailable
from trapetum.kernels.cpu.pool import Pool
from trapetum.models.config import ACTIVATIONS
from trapetum.runtime.cuda.layers import _GATES
from trapetum.runtime.model import model_of

Sources = Callable[..., Any]

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
DELTA = {
    "head_dim": 32,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
}
SMALL = {"head_dim": 16}
# Name of the architecture, changes to the config, where experts run, and the words after "no CUDA kernels: ".
REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "delta nets": ("Qwen3_5ForCausalLM", DELTA, "card", "gated delta nets; attention with an output gate"),
    "delta nets and experts": (
        "Qwen3NextForCausalLM",
        DELTA | EXPERTS | {"shared_expert_intermediate_size": 16},
        "card",
        "gated delta nets; attention with an output gate; routed experts",
    ),
    "delta nets, experts on the CPU": (
        "Qwen3NextForCausalLM",
        DELTA | EXPERTS | {"shared_expert_intermediate_size": 16},
        "cpu",
        "gated delta nets; attention with an output gate",
    ),
    "latent attention": ("DeepseekV2ForCausalLM", LATENT, "cpu", "latent attention"),
    "latent attention, experts": (
        "DeepseekV3ForCausalLM",
        LATENT | {"n_group": 2, "topk_group": 1},
        "card",
        "latent attention; routed experts",
    ),
    "experts": ("Qwen3MoeForCausalLM", SMALL | EXPERTS, "card", "routed experts"),
    "wide norms": ("Olmo2ForCausalLM", SMALL, "card", "norms over all heads together"),
    "narrow heads": (
        "LlamaForCausalLM",
        {"head_dim": 24},
        "card",
        "heads of 24 .multiples of 16 up to 256 have some.",
    ),
    "two reasons": (
        "LlamaForCausalLM",
        {"head_dim": 8, "hidden_size": 16448},
        "card",
        "a hidden size of 16448 .up to 16384 have some.; heads of 8 .multiples of 16 up to 256 have some.",
    ),
}


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CuPy that finds a card and can do nothing else."""
    cupy = ModuleType("cupy")
    runtime = SimpleNamespace(getDeviceCount=lambda: 1, CUDARuntimeError=RuntimeError)
    cupy.__dict__.update(cuda=SimpleNamespace(runtime=runtime), __version__="0")
    monkeypatch.setitem(sys.modules, "cupy", cupy)


def unread(source: Any) -> Any:
    """The source, if only its description is read."""

    def load(name: str, rows: slice | None = None) -> Any:
        raise AssertionError(f"{name} was read")

    source.load = load
    return source


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_kernels_is_named(case: str, memory_source: Sources) -> None:
    architecture, changes, experts, words = REFUSED[case]
    source = unread(memory_source(architectures=[architecture], **changes))
    with pytest.raises(KernelUnavailable, match=f"needs what has no CUDA kernels: {words}$") as caught:
        model_of(source, Pool(1), "cuda", experts=experts)
    assert caught.value.message.startswith(f"{source.path}: ")
    alone = "--experts cpu" if case == "experts" else "--device cpu"
    assert alone in (caught.value.hint or "")


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    ("architecture", "changes", "experts"),
    [
        ("LlamaForCausalLM", SMALL, "card"),
        ("Qwen3ForCausalLM", SMALL, "card"),
        ("Qwen3MoeForCausalLM", SMALL | EXPERTS, "cpu"),
        ("Gemma2ForCausalLM", SMALL | {"hidden_act": "gelu_pytorch_tanh"}, "card"),
    ],
)
def test_what_has_kernels_goes_on_to_the_card(
    architecture: str, changes: dict[str, Any], experts: str, memory_source: Sources
) -> None:
    source = unread(memory_source(architectures=[architecture], **changes))
    with pytest.raises(AttributeError, match="Stream"):  # the first thing that is asked of CuPy
        model_of(source, Pool(1), "cuda", experts=experts)


def test_every_activation_has_a_kernel() -> None:
    assert set(_GATES) == set(ACTIVATIONS)


@pytest.mark.usefixtures("card")
def test_a_refused_model_leaves_no_file_open(memory_source: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    source = memory_source(architectures=["Qwen3_5ForCausalLM"], **DELTA)
    monkeypatch.setattr("trapetum.formats.source.open_source", lambda path: source)
    with pytest.raises(KernelUnavailable, match="qwen3_5_text needs what has no CUDA kernels"):
        trapetum.load(source.path, device="cuda")
    assert source.closed
