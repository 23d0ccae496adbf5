"""How close the logits of every family are to those of transformers and of llama.cpp.

    python benchmarks/architectures.py [FAMILY ...]

Makes a tiny random model of each family with transformers, runs 100 tokens (past windows and original rotary lengths)
through it and through this runtime, then writes GGUF files of F32 and F16 tensors and asks llama.cpp (xllamacpp,
float32 keys and values, one thread) for the log-probabilities after three prompts. Prints a table in Markdown: the
largest difference over the largest logit against transformers, over the spread of our logits against llama.cpp.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import xllamacpp
from numpy.typing import NDArray

import trapetum
from trapetum.errors import UnsupportedModelError
from trapetum.export import export_artifact
from trapetum.models.architectures import ARCHITECTURES

Floats = NDArray[Any]

VOCABULARY = 320
TOKENS = 100
PROMPTS = (40, 60, 90)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.09,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + i / 20 for i in range(12)],
    "long_factor": [1.2 + i / 4 for i in range(12)],
}
GEMMA: dict[str, Any] = {
    "num_hidden_layers": 7,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 16,
    "tie_word_embeddings": True,
}
BY_TYPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
GRANITE = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.05,
    "logits_scaling": 4.0,
}
EIGHT = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
SECTIONS = {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Llama 3.x (llama3 rope, tied)": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "Mistral": ("mistral", {"sliding_window": None}),
    "Qwen2, Qwen2.5": ("qwen2", {}),
    "Qwen2.5, YaRN": ("qwen2", {"rope_parameters": YARN}),
    "Qwen3": ("qwen3", {"head_dim": 64}),
    "Phi-3, Phi-4": ("phi3", {}),
    "Phi-4-mini (LongRoPE, partial)": (
        "phi3",
        {
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 32,
            "rope_parameters": LONGROPE,
        },
    ),
    "Gemma": ("gemma", {"head_dim": 32, "tie_word_embeddings": True}),
    "Gemma-2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 15.0}),
    "Gemma-3": ("gemma3_text", {**GEMMA, "rope_parameters": BY_TYPE}),
    "Granite": ("granite", GRANITE),
    "Seed-OSS": ("seed_oss", {"head_dim": 64}),
    "SmolLM3": ("smollm3", {"tie_word_embeddings": True, "num_hidden_layers": 4}),
    "OLMo-2": ("olmo2", {}),
    "OLMo-3": ("olmo3", {"sliding_window": 16, "num_hidden_layers": 4}),
    "Mixtral": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "Qwen2-MoE": ("qwen2_moe", {**EIGHT, "shared_expert_intermediate_size": 64}),
    "Qwen3-MoE": ("qwen3_moe", {**EIGHT, "head_dim": 64, "norm_topk_prob": True}),
    "OLMoE": ("olmoe", {**EIGHT, "norm_topk_prob": False, "num_key_value_heads": 4}),
    "gpt-oss": (
        "gpt_oss",
        {
            "head_dim": 32,
            "sliding_window": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_parameters": YARN,
        },
    ),
    "DeepSeek-V2-Lite": (  # engines tell it by its number of layers
        "deepseek_v2",
        {**LATENT, "q_lora_rank": None, "n_shared_experts": 2, "num_hidden_layers": 27},
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        {**LATENT, "q_lora_rank": 48, "n_group": 4, "topk_group": 2, "n_shared_experts": 1},
    ),
    "Qwen3-Next": ("qwen3_next", {**DELTA, **EIGHT, "shared_expert_intermediate_size": 64}),
    "Qwen3.5": (
        "qwen3_5_text",
        {**DELTA, "rope_parameters": {**DELTA["rope_parameters"], **SECTIONS}},
    ),
    "Qwen3.5-MoE": (
        "qwen3_5_moe_text",
        {
            **DELTA,
            **EIGHT,
            "shared_expert_intermediate_size": 64,
            "rope_parameters": {**DELTA["rope_parameters"], **SECTIONS},
        },
    ),
}


def make(folder: Path, family: str, options: dict[str, Any], *, seed: int = 7, grown: bool = False) -> Any:
    """A random model; every vector is random as well, so that a forgotten one shows.

    Every block adds about ``1 / sqrt(2 layers)`` of the embedding's size to the residual stream, as in GPT-2's
    initialisation; ``grown``: as much as the stream holds, so that nothing is damped (see ``half_products.py``).
    """
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **options})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    architecture = ARCHITECTURES[family]
    small = (2 * config.num_hidden_layers) ** -0.5
    with torch.no_grad():
        for name, values in model.named_parameters():
            role = architecture.role(name)
            if values.ndim == 1 and "A_log" not in name:
                values.add_(torch.randn_like(values) * 0.2)
            if not grown and "post_norm" in role.part:
                offset = architecture.module(role.part).offset
                values.copy_((values + offset) * small - offset)
            elif not grown and role.kind in ("o", "down"):
                values.mul_(small)
            elif not grown and role.kind == "embed" and not config.tie_word_embeddings:
                values.div_(values.std())
            if values.ndim > 1:
                values.copy_(values.half().float())  # weights that F16 holds, as a checkpoint's do
        for name, values in model.named_buffers():
            if "e_score_correction_bias" in name:
                values.copy_(torch.randn_like(values) * 0.1)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def prompt() -> list[int]:
    """Token ids, the longest prompt of all."""
    return np.random.default_rng(1).integers(3, VOCABULARY, TOKENS).tolist()  # type: ignore[no-any-return]


def write_tokenizer(folder: Path) -> None:
    """Single characters only: llama.cpp holds back tokens that are part of one."""
    pieces = ["<unk>", "<s>", "</s>", *(chr(0x4E00 + i) for i in range(VOCABULARY - 3))]
    flags = {k: False for k in ("single_word", "lstrip", "rstrip", "normalized")} | {"special": True}
    steps = [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ]
    content = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": pieces[i], **flags} for i in range(3)],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": [],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))


def engine_answers(file: Path, ids: list[int]) -> list[Floats]:
    """llama.cpp's log-probabilities after each prompt, float64 [vocabulary]."""
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 256, 1, False, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    found = []
    for length in PROMPTS:
        answer = server.handle_completions(
            {
                "prompt": ids[:length],
                "max_tokens": 1,
                "temperature": 0,
                "n_probs": VOCABULARY,
                "logprobs": VOCABULARY,
                "cache_prompt": False,
                "ignore_eos": True,
            }
        )
        theirs = np.full(VOCABULARY, np.nan)
        for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            theirs[entry["id"]] = entry["logprob"]
        found.append(theirs)
    return found


def log_softmax(logits: Floats) -> Floats:
    """float64."""
    wide = logits.astype(np.float64) - logits.max()
    return wide - np.log(np.exp(wide).sum())


def largest(theirs: list[Floats], ours: list[Floats], logits: list[Floats]) -> float:
    """The largest difference of log-probabilities, over the spread of the logits."""
    return max(float(np.abs(a - b).max() / x.std()) for a, b, x in zip(theirs, ours, logits, strict=True))


def measure(name: str) -> str:
    """One row of the table."""
    family, options = CASES[name]
    ids = prompt()
    with tempfile.TemporaryDirectory(prefix="tiny-") as place:
        folder = Path(place) / "tiny"
        theirs = make(folder, family, options)
        with torch.no_grad():
            expected = theirs(torch.tensor([ids])).logits[0].float().numpy()
        columns = []
        with trapetum.load(folder, threads=1) as model:
            ours = model.logits(ids)
            columns.append(f"{np.abs(ours - expected).max() / np.abs(expected).max():.1e}")
            last = [model.logits(ids[:length])[-1] for length in PROMPTS]
            gguf = model.config.architecture.gguf or ""
            for kind in ("F32", "F16"):
                try:
                    file = export_artifact(folder, "gguf", Path(place) / f"{kind}.gguf", gguf_type=kind)
                    found = largest(engine_answers(file, ids), [log_softmax(x) for x in last], last)
                    columns.append(f"{found:.1e}")
                except UnsupportedModelError:
                    columns.append("no export")
    return f"| {name} | `{type(theirs).__name__}` | {gguf} | " + " | ".join(columns) + " |"


def main() -> None:
    """Print a Markdown table, one row a family: differences from transformers and from llama.cpp, then the versions.

    Usage: ``python benchmarks/architectures.py [FAMILY ...]``.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("family", nargs="*", default=list(CASES), help="names of the first column")
    wanted = parser.parse_args().family
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    versions = {n: importlib.metadata.version(n) for n in ("transformers", "xllamacpp", "torch", "numpy")}
    print("| family | class | GGUF | transformers | llama.cpp, F32 | llama.cpp, F16 |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in wanted:
        print(measure(name), flush=True)
    print("\n" + ", ".join(f"{n} {v}" for n, v in versions.items()))


if __name__ == "__main__":
    main()
