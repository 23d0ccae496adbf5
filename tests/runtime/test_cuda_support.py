"""Models that a card cannot run are refused in one sentence, before a weight is read; no card is needed to say so."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import trapetum
from trapetum.errors import KernelUnavailable
from trapetum.kernels.cpu.pool import Pool
from trapetum.models.architectures import ARCHITECTURES
from trapetum.models.config import ACTIVATIONS, parse_config
from trapetum.models.rope import Rope
from trapetum.runtime.cuda import model as card_model
from trapetum.runtime.cuda.layers import _GATES
from trapetum.runtime.cuda.model import CardModel
from trapetum.runtime.cuda.support import check_support
from trapetum.runtime.model import Model, model_of
from trapetum.runtime.sampling import Sampling
from trapetum.runtime.weights import Weights

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


# What each family needs, by the words of the message: "" runs on a card. docs/architectures.md says the same.
_WHOLE = "norms over all heads together"
_GATED = "gated delta nets; attention with an output gate"
_SHARED = {"shared_expert_intermediate_size": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text"), ("", SMALL)
    ),
    **dict.fromkeys(("granite", "seed_oss", "smollm3"), ("", SMALL)),
    **dict.fromkeys(("olmo2", "olmo3"), (_WHOLE, SMALL)),
    "mixtral": ("routed experts", SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("routed experts", SMALL | EXPERTS | _SHARED),
    "qwen3_moe": ("routed experts", SMALL | EXPERTS),
    "gpt_oss": ("routed experts", SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": (f"routed experts; {_WHOLE}", SMALL | EXPERTS),
    "deepseek_v2": ("latent attention; routed experts", LATENT),
    "deepseek_v3": ("latent attention; routed experts", LATENT | {"n_group": 2, "topk_group": 1}),
    "qwen3_next": (f"{_GATED}; routed experts", DELTA | EXPERTS | _SHARED),
    "qwen3_5_text": (_GATED, DELTA),
    "qwen3_5_moe_text": (f"{_GATED}; routed experts", DELTA | EXPERTS | _SHARED),
}


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_every_family_runs_or_says_why_not(family: str, memory_source: Sources) -> None:
    words, changes = FAMILIES[family]
    source = memory_source(architectures=[ARCHITECTURES[family].classes[0]], model_type=family, **changes)
    weights = Weights(source, parse_config(source.config), Pool(1), "fast")
    for experts in ("card", "cpu"):
        left = "; ".join(w for w in words.split("; ") if experts == "card" or w != "routed experts")
        if not left:
            check_support(weights, experts)
            continue
        with pytest.raises(KernelUnavailable) as caught:
            check_support(weights, experts)
        assert caught.value.message.endswith(f"{family} needs what has no CUDA kernels: {left}")


@pytest.mark.usefixtures("card")
def test_a_refused_model_leaves_no_file_open(memory_source: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    source = memory_source(architectures=["Qwen3_5ForCausalLM"], **DELTA)
    monkeypatch.setattr("trapetum.formats.source.open_source", lambda path: source)
    with pytest.raises(KernelUnavailable, match="qwen3_5_text needs what has no CUDA kernels"):
        trapetum.load(source.path, device="cuda")
    assert source.closed


class OutOfMemoryError(MemoryError):
    """As CuPy's, by its name."""


OutOfMemoryError.__module__ = "cupy.cuda.memory"


@pytest.mark.usefixtures("card")
def test_a_card_that_is_too_small_is_not_the_machine(
    memory_source: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = memory_source(**SMALL)

    def full(*size: Any) -> None:
        raise OutOfMemoryError("Out of memory allocating 1,024 bytes")

    sys.modules["cupy"].cuda.Stream = lambda **options: contextlib.nullcontext()
    for name, kind in (("float32", np.float32), ("zeros", np.zeros), ("empty", full)):
        monkeypatch.setattr(sys.modules["cupy"], name, kind, raising=False)
    words = "the card has no memory for the weights: Out of memory allocating 1,024 bytes$"
    with pytest.raises(KernelUnavailable, match=words) as caught:
        model_of(source, Pool(1), "cuda")
    assert "--device cpu" in (caught.value.hint or "")

    def small(*size: Any) -> None:
        raise MemoryError("the machine's own")

    monkeypatch.setattr(sys.modules["cupy"], "empty", small)
    with pytest.raises(MemoryError, match="the machine's own"):
        model_of(source, Pool(1), "cuda")


class Frequencies:
    """An array on the card that knows what it was set to."""

    def __init__(self, value: np.ndarray) -> None:
        self.value = value

    def set(self, value: np.ndarray) -> None:
        self.value = value


class Session:
    """Notes with which frequencies each pass runs."""

    def __init__(self, model: Any, sequences: int, capacity: int, steps: int) -> None:
        self.model, self.tokens = model, np.zeros((max(1, steps), sequences), np.int32)

    def note(self) -> None:
        self.model.seen += [array.value.copy() for array in self.model._on_card.values()]

    def prompt(self, sequence: int, ids: np.ndarray) -> Iterator[np.ndarray]:
        self.note()
        yield np.zeros((ids.size, self.model.config.hidden_size), np.float16)

    def begin(self, sequence: int, ids: np.ndarray) -> None:
        self.note()

    def step(self, sampling: Sampling) -> None:
        self.note()

    def fetch(self, step: int) -> Any:
        return SimpleNamespace(synchronize=lambda: None)

    def randomise(self, numbers: Any) -> None:
        pass

    def choose(self, sampling: Sampling) -> None:
        pass


SCALED: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "dynamic": {
        "rope_type": "dynamic",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 16,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0],
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("length", [5, 14, 16, 17, 30])
def test_frequencies_are_those_of_the_cpu(
    kind: str, length: int, memory_source: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was run before, and while a text grows past the length that the model was made for."""
    source = memory_source(**SMALL, rope_parameters=SCALED[kind], max_position_embeddings=16)
    cpu = Model(source, Pool(1))
    (rope,) = cpu._ropes
    wanted: list[np.ndarray] = []
    plain = Rope.inverse_frequencies
    original = cpu.rotary

    def rotary(start: int, stop: int, text: int) -> Any:
        wanted.append(plain(rope, cpu.config.rotary_dim, text))
        return original(start, stop, text)

    monkeypatch.setattr(cpu, "rotary", rotary)
    card = CardModel.__new__(CardModel)
    card.config, card.source = cpu.config, source
    card.stream = contextlib.nullcontext()
    card.stream.synchronize = lambda: None
    card._on_card = {rope: Frequencies(plain(rope, cpu.config.rotary_dim))}
    card._regimes = {rope: rope.regime(0)}
    card._ropes = cpu._ropes
    monkeypatch.setattr(card_model, "Session", Session)
    monkeypatch.setattr(card_model, "import_cupy", lambda: np)
    monkeypatch.setattr(np, "asnumpy", np.asarray, raising=False)

    ids = np.arange(length)
    for run in (lambda m: list(m._tokens(ids, 6, Sampling(), 0)), lambda m: m.hidden(ids[None])):
        wanted.clear()
        with cpu.pool.session():
            run(cpu)
        card.seen = []
        run(card)
        assert len(card.seen) == len(wanted)
        for found, right in zip(card.seen, wanted, strict=True):
            np.testing.assert_array_equal(found, right)
