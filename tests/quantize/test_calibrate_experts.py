"""Calibration of routed experts: who saw which tokens, what poor experts borrow, stages that pair no routed tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trapetum.formats.imatrix import open_statistics, write_imatrix
from trapetum.formats.source import open_source
from trapetum.kernels.cpu.pool import Pool
from trapetum.progress import Progress
from trapetum.runtime import calibrate
from trapetum.runtime.calibrate import Inputs, collect, distinct_inputs
from trapetum.runtime.paired import paired_stages

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "num_local_experts": 4,
    "num_experts_per_tok": 2, "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IDS = np.random.default_rng(0).integers(3, 64, (2, 40)).astype(np.intp)


class Notes(Progress):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("mixtral", **SIZES)
    )
    with torch.no_grad():
        for name, values in model.named_parameters():
            values.copy_(
                torch.randn_like(values) * values.shape[-1] ** -0.5 + (1.0 if "norm" in name else 0.0)
            )
    folder = tmp_path_factory.mktemp("mixtral")
    model.save_pretrained(folder)
    return folder


def run(folder: Path, progress: Progress | None = None) -> dict[str, Inputs]:
    with open_source(folder) as source:
        pool = Pool(2)
        found = list(collect(source, IDS, pool, moments=True, progress=progress))
        pool.close()
        assert [i.weights for i in found] == [weights for weights, _ in distinct_inputs(source)]
    return {i.weights[0]: i for i in found}


def test_experts_see_their_tokens_and_borrow_the_rest(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "ENOUGH", 0)
    notes = Notes()
    own = run(mixtral, notes)
    assert not notes.texts
    monkeypatch.setattr(calibrate, "ENOUGH", 2)
    lent = run(mixtral, notes)
    assert any("inputs of experts saw fewer than 2 tokens for each input" in text for text in notes.texts)
    for part, width in (("w1", 32), ("w2", 64)):
        names = [f"model.layers.1.block_sparse_moe.experts.{e}.{part}.weight" for e in range(4)]
        names = [n if n in own else n.replace("block_sparse_moe", "mlp") for n in names]
        assert sum(own[n].tokens for n in names) == 2 * IDS.size  # two experts a token
        total = sum(own[n].moment for n in names)
        for name in names:
            wanted = max(0, min(2 * IDS.size, 2 * width - own[name].tokens))
            assert lent[name].borrowed == wanted
            assert lent[name].tokens == own[name].tokens + wanted
            moment = own[name].moment + total * (wanted / (2 * IDS.size))
            assert np.allclose(lent[name].moment, moment)
            assert np.allclose(lent[name].squares, moment.diagonal())


def test_importance_of_experts_is_a_stack(mixtral: Path, tmp_path: Path) -> None:
    found = run(mixtral)
    named = {name: (i.squares, i.tokens) for i in found.values() for name in i.weights}
    left_out = write_imatrix(tmp_path / "i.gguf", named)
    assert not any("experts" in name for name in left_out)
    with open_statistics(tmp_path / "i.gguf") as file:
        assert "blk.1.ffn_down_exps.weight" in file.names()
        for name in (n for n in named if "experts" in n):
            squares, tokens = named[name]
            assert np.allclose(file.diagonal(name, len(squares)), squares / tokens, rtol=1e-5)


def test_routed_experts_have_moments_but_no_aim(mixtral: Path) -> None:
    with open_source(mixtral) as source:
        pool = Pool(2)
        stages = list(paired_stages(source, source, IDS, pool, wanted=lambda weights: True))
        pool.close()
    plain = run(mixtral)
    routed = [one for stage in stages for one in stage if "experts" in one.weights[0]]
    assert len(routed) == 16
    assert all(one.cross is None and one.drift is None for one in routed)
    for one in (one for stage in stages for one in stage):
        if "experts" not in one.weights[0]:
            assert np.allclose(one.moment, plain[one.weights[0]].moment, rtol=1e-5)
