"""What a GGUF of a model will hold, checked before any work: tensors and their types, metadata, names, sizes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trapetum.blocktypes import BLOCK_TYPES
from trapetum.errors import OutputError, RecipeError, UnsupportedModelError, listed, located
from trapetum.export.deltas import DeltaView, delta_pairs, delta_sizes, stored_deltas
from trapetum.export.gguf import GgufJob, GgufPlan, family, is_file
from trapetum.export.gguf_attention import attention_faults, attention_notes, rope_tensors
from trapetum.export.gguf_experts import expert_faults, expert_pairs
from trapetum.export.gguf_latent import latent_faults, latent_pairs
from trapetum.export.gguf_metadata import (
    file_name,
    general_pairs,
    model_pairs,
    model_title,
    size_label,
)
from trapetum.export.gguf_ternary import TERNARY_NAMES, ternary_fit
from trapetum.export.gguf_tokenizer import tokenizer_pairs
from trapetum.export.gguf_types import (
    AUTO,
    FITTED_NAMES,
    PLAIN_NAMES,
    cheapest_type,
    fallback_type,
    known_type,
)
from trapetum.export.latents import LatentView, split_latents
from trapetum.export.plan import ExportRequest, ExportRow, refuse_existing, same_tensor
from trapetum.export.stacks import StackedExperts, stacked
from trapetum.formats.artifact import Artifact
from trapetum.formats.checksums import GGUF_SUMS, gguf_sums, is_listable
from trapetum.formats.decoded import rotation_of
from trapetum.formats.gguf_names import FAMILIES, Family, gguf_name
from trapetum.formats.gguf_rotation import rotation_pairs
from trapetum.formats.gguf_source import GgufSource
from trapetum.formats.source import TensorSource
from trapetum.models.architectures import Role, text_config
from trapetum.models.config import ModelConfig, parse_config
from trapetum.rotation import HadamardRotation
from trapetum.tensors import BlockTensor, DenseTensor, TernaryTensor

__all__ = ["plan_gguf"]

_F32 = BLOCK_TYPES["F32"]
_KNOWN = ("*.gguf", f"*.gguf{GGUF_SUMS}")
_EXPORT_SOMEWHERE = "Export to hf instead, which holds every model."
_NOTABLE_GROWTH = 1.1
_PRISM = (
    "the Prism fork of llama.cpp (prism-v7 and later) and what follows it; stock llama.cpp refuses the file"
)
# Types that only some engines read, and which.
_READERS = {
    "PQ2_0": _PRISM,
    "PTQ1_0": _PRISM,
    "Q2_0": "llama.cpp builds that know type 42 (2026); without SIMD kernels for it on x86 it is slow there",
    "TQ1_0": "llama.cpp since September 2024",
    "TQ2_0": "llama.cpp since September 2024",
}
# Engines abort on norms and biases of any other type, and small maps deserve it.
_ALWAYS_F32 = ("norm", "bias", "router", "vector")
_FUSED = (("q", "k", "v"), ("gate", "up"))


def plan_gguf(request: ExportRequest) -> GgufPlan:
    """Check that a GGUF can hold the model, and say what each tensor becomes.

    Parameters
    ----------
    request : ExportRequest
        ``out`` ending in ``.gguf`` is the file's name; anything else is a folder, and the name follows the
        convention of the format.

    Raises
    ------
    UnsupportedModelError
        With everything that a GGUF of this family cannot hold.
    CheckpointError
        If a tensor is missing or misshapen, or the tokenizer is missing or too large.
    RecipeError
        If an option is of no use here, or the type is unknown.
    OutputError
        If the output exists.
    """
    return _Planner(request).plan()


class _Planner:
    """One export being planned; collects faults and notes on the way."""

    def __init__(self, request: ExportRequest) -> None:
        self.request = request
        self.artifact: TensorSource = request.artifact
        self.asked = known_type(request.gguf_type)
        if self.artifact.kind == "checkpoint" and self.artifact.config.get("quantization_config"):
            raise UnsupportedModelError(
                f"{self.artifact.path}: is quantized by another tool",
                hint="Run trapetum quantize on it first.",
            )
        _refuse_existing(request)
        with located(self.artifact.path):
            self.config: ModelConfig = parse_config(self.artifact.config)
        self.arch = self.config.architecture
        if self.arch.gguf not in FAMILIES:
            raise UnsupportedModelError(
                f"{self.artifact.path}: architecture {self.arch.model_type} has no GGUF family here",
                hint=_EXPORT_SOMEWHERE,
            )
        self.family: Family = FAMILIES[self.arch.gguf]
        whole = split_latents(stacked(request.artifact, self.config), self.config)
        self.arch.check_tensors(self.config, {n: whole.shape(n) for n in whole.names()})
        self.artifact = stored_deltas(whole, self.config)
        self.names = self.arch.index(self.artifact.names())
        self.records: Mapping[str, Any] = {}
        if isinstance(self.artifact, Artifact | StackedExperts | LatentView):
            self.records = self.artifact.records
        self.source = (
            None
            if request.source is None
            else stored_deltas(split_latents(stacked(request.source, self.config), self.config), self.config)
        )
        self.rotation: HadamardRotation | None = None  # of the folded tensors, all the same
        self.faults: list[str] = []
        self.misfits: list[str] = []  # faults that another type would not have
        self.notes: list[str] = []
        self.fitted = 0
        self.folded: list[str] = []
        self.others: dict[str, list[str]] = {}  # another type than the one asked for -> tensors

    def plan(self) -> GgufPlan:
        jobs = self._jobs()
        self._check_asked()
        self._check_head()
        self.faults += attention_faults(self.config, str(self.arch.gguf))
        self.faults += expert_faults(self.config, str(self.arch.gguf))
        self.faults += latent_faults(self.config)
        if faults := self.faults + self.misfits:
            raise UnsupportedModelError(
                f"{self.artifact.path}: a GGUF cannot hold this model as asked: {listed(faults)}",
                hint="Export to hf instead."
                if self.faults
                else "Choose another --gguf-type (F16 and F32 hold any weights that are not rotated), or export to hf.",
            )
        files = {p.name: p for p in self.artifact.side_files()}
        text = text_config(self.artifact.config)
        tokenizer, notes = tokenizer_pairs(files, text, self.config.vocab_size)
        unused = int(np.sum(np.asarray(tokenizer["tokenizer.ggml.token_type"].value) == 5))
        if unused:
            self.notes.append(f"{unused} rows of the embedding have no token and get unused padding tokens")
        self.notes += notes
        weights = Counter[str]()
        for job in jobs:
            weights[job.kind.name] += math.prod(job.shape)
        majority = weights.most_common(1)[0][0]
        title, parameters = (
            model_title(self.request.artifact),
            sum(math.prod(j.shape) for j in jobs if j.origin is not None),
        )
        pairs = {
            **general_pairs(self.request.artifact, str(self.arch.gguf), title, parameters, majority),
            **model_pairs(self.config, str(self.arch.gguf)),
            **expert_pairs(self.config, str(self.arch.gguf)),
            **latent_pairs(self.config),
            **delta_pairs(self.config, self.artifact),
            **tokenizer,
            **self._rotation_pairs(),
        }
        self._note_about(jobs)
        out = self.request.out
        name = out.name if is_file(out) else file_name(title, size_label(parameters), majority)
        rows = [job.row for job in jobs]
        plan = GgufPlan(self.request, 0, {}, rows, self.notes, name=name, pairs=pairs, jobs=jobs)
        sizes = plan.writer(out if is_file(out) else out / name).sizes()
        plan.files = {path.name: size for path, size in sizes.items()}
        plan.size = sum(sizes.values())
        return plan

    # ------------------------------------------------------------------ tensors
    def _jobs(self) -> list[GgufJob]:
        jobs = []
        for factors_name, factors in rope_tensors(self.config).items():
            row = ExportRow(factors_name, "exact", "from config.json -> F32")
            jobs.append(GgufJob(row.name, _F32, factors.shape, row, "plain", stored=DenseTensor(factors)))
        place = {module.part: i for i, module in enumerate(self.arch.modules)}

        def order(item: tuple[Role, str]) -> tuple[int, ...]:
            """Embedding, layers, final norm, head."""
            part, layer = item[0].part, item[0].layer
            group = 1 if layer is not None else 0 if part == "embed" else 2
            return group, layer or 0, place[part], int(item[0].kind == "bias")

        for role, name in sorted(self.names.items(), key=order):
            jobs += self._tensor(role, name)
        return jobs

    def _tensor(self, role: Role, name: str) -> list[GgufJob]:
        suffix = "bias" if role.kind == "bias" else "weight"
        canonical = self.arch.tensor_name(role.part, role.layer, expert=role.expert, suffix=suffix)
        target = gguf_name(canonical, self.family)
        if target is None:
            self.faults.append(f"tensor {name} has no name in a GGUF")
            return []
        module = target.split(".")[-2]
        if suffix == "bias" and module not in self.family.biases:
            self.faults.append(f"engines do not read the bias {name} in the family {self.arch.gguf}")
            return []
        heads = {"q": self.config.num_attention_heads, "k": self.config.num_key_value_heads}.get(role.part)
        job = GgufJob(
            target,
            _F32,
            self.artifact.shape(name),
            ExportRow(target, "exact", ""),
            "plain",
            (self.artifact, name),
            heads=heads if self.family.interleaved else None,
            offset=self.arch.module(role.part).offset,
        )
        stored = self._stored(name)
        taken_over = self._take_over(job, role, name)
        if len(job.shape) > 1 and role.kind not in _ALWAYS_F32 and not taken_over:
            self._choose(job, role, name)
        job.row.detail = f"{stored} -> {job.kind.name}" + job.row.detail
        if job.common_scale is None:
            return [job]
        row = ExportRow(target.removesuffix("weight") + "scale", "exact", f"scale of {target} -> F32")
        scale = np.array([job.common_scale], np.float32)
        return [job, GgufJob(row.name, _F32, (1,), row, "plain", stored=DenseTensor(scale))]

    def _take_over(self, job: GgufJob, role: Role, name: str) -> bool:
        """Of a GGUF, take as they are what a checkpoint's form of it loses: norms and rates, blocks of cut heads.

        A norm less one and the logarithm of a rate are rounded in float32. Blocks across heads are read as numbers.
        What has a scale beside it in the file says nothing without it, so that is read as numbers, too.
        """
        file = self.request.artifact
        if not isinstance(file, GgufSource) or file.is_scaled(name):
            return False
        found = file.as_in_file(name)
        cut = role.part == "delta_out" and file.layout(name) == DenseTensor.layout
        if isinstance(found, BlockTensor) and cut and self.asked == AUTO:
            job.kind, job.action, job.stored = found.block_type, "keep", found
        elif found.layout == DenseTensor.layout and (job.offset or role.part == "delta_rate"):
            job.stored, job.offset = found, 0.0
        return job.stored is not None

    def _choose(self, job: GgufJob, role: Role, name: str) -> None:
        """Type and action of a matrix."""
        layout = self.artifact.layout(name)
        rotation = rotation_of(self.artifact, name)
        rotated = rotation is not None
        if rotated:
            self.rotation = rotation
            self.folded.append(job.name)
        if self.asked in PLAIN_NAMES:
            job.kind = BLOCK_TYPES[self.asked]
            if rotated:
                self._refuse_rotated(name, self.asked)
        elif isinstance(self.artifact, DeltaView) and (cut := self.artifact.cut_type(name)) is not None:
            self.fitted += 1
            job.kind = BLOCK_TYPES[cut if cut in FITTED_NAMES else "Q8_0"]
            job.action, job.row.action = "fit", "quantized"
            job.row.detail = f" ({cut} blocks do not hold whole heads, which change places)"
            if self.source is not None:
                job.origin = (self.source, same_tensor(self.source, self.arch, role, self.artifact, name))
        elif layout == DenseTensor.layout:
            plain = {np.dtype(t.dtype): t for t in map(BLOCK_TYPES.__getitem__, PLAIN_NAMES)}
            dtype = self.artifact.dtype(name)
            if dtype not in plain:
                self.faults.append(f"tensor {name} is {dtype}, which no GGUF type holds")
            job.kind = plain.get(dtype, _F32)
        elif layout == BlockTensor.layout:
            first = self.artifact.load(name, slice(0, 1))
            job.kind = BLOCK_TYPES[first.type] if isinstance(first, BlockTensor) else _F32
            job.action = "keep"
        elif layout == TernaryTensor.layout:
            self._choose_ternary(job, role, name, rotated)
        else:
            self._choose_fitted(job, role, name)

    def _choose_ternary(self, job: GgufJob, role: Role, name: str, rotated: bool) -> None:
        asked = self.asked if self.asked in TERNARY_NAMES else ("PQ2_0" if rotated else TERNARY_NAMES[0])
        job.kind, job.action = BLOCK_TYPES[asked], "pack"
        if rotated and job.kind.name not in ("PQ2_0", "PTQ1_0"):
            self._refuse_rotated(name, asked)
            return
        fit = ternary_fit(self.artifact, name, job.kind)
        if fit.problem:
            self.misfits.append(f"{name} as {asked}: {fit.problem}")
        elif fit.common_scale is not None and (
            role.kind in ("embed", "head") or role.part.startswith("experts_")
        ):
            self.misfits.append(
                f"{name} as {asked}: its scale is no float16, and engines read none beside this tensor"
            )
        job.common_scale = fit.common_scale

    def _choose_fitted(self, job: GgufJob, role: Role, name: str) -> None:
        self.fitted += 1
        job.action, job.row.action = "fit", "quantized"
        if self.source is not None:
            found = same_tensor(self.source, self.arch, role, self.artifact, name)
            job.origin = (self.source, found)
            job.row.detail = ", from the source"
        if self.asked in FITTED_NAMES:
            job.kind = fallback_type(self.asked, job.shape[-1])
            if job.kind.name != self.asked:
                why = f"rows of {job.shape[-1]} are not whole blocks of {self.asked}"
                job.row.detail += f" ({why})"
                self.others.setdefault(f"{why}; {job.kind.name} is taken instead", []).append(job.name)
        else:
            own = self.records[name].relative_error or 0.0
            source = job.origin if self.source is not None else None
            job.kind = cheapest_type(self.artifact, name, own, source)
        if job.kind.dtype is not None:
            job.action, job.row.action = "plain", "exact"

    def _stored(self, name: str) -> str:
        layout = self.artifact.layout(name)
        return str(self.artifact.dtype(name)) if layout == DenseTensor.layout else layout

    # ------------------------------------------------------------------ rotation
    def _refuse_rotated(self, name: str, asked: str) -> None:
        self.misfits.append(
            f"{name} is rotated (Hadamard), and a stock engine would load it as {asked} without undoing that; "
            "PQ2_0 and PTQ1_0 can be asked for"
        )

    def _rotation_pairs(self) -> dict[str, Any]:
        if self.rotation is None:
            return {}
        sizes = delta_sizes(self.config, self.artifact)
        return rotation_pairs(
            self.rotation,
            self.folded,
            tied=all(role.kind != "head" for role in self.names),
            delta_grouped=sizes is not None and sizes.moved and sizes.grouped_output,
        )

    # ------------------------------------------------------------------ checks and notes
    def _check_asked(self) -> None:
        """An option that changes nothing is a mistake."""
        layouts = {self.artifact.layout(n) for n in self.names.values()}
        if self.asked in TERNARY_NAMES and TernaryTensor.layout not in layouts:
            raise RecipeError(
                f"gguf type is {self.asked}; {self.artifact.path} has no ternary tensors",
                hint="Make some with trapetum quantize --scheme ternary.",
            )
        if self.asked in FITTED_NAMES and not self.fitted:
            raise RecipeError(
                f"gguf type is {self.asked}; {self.artifact.path} has no codebooks to fit to it",
                hint=f"Quantize straight into the type: trapetum quantize MODEL --scheme gguf:{self.asked}.",
            )
        if self.request.source is not None and not self.fitted:
            raise RecipeError(
                "a source is of no use to this export, which fits nothing again", hint="Leave --source out."
            )

    def _check_head(self) -> None:
        """Some families have a head of their own, some have none."""
        own = any(role.kind == "head" for role in self.names)
        if own and self.family.head == "tied":
            self.faults.append(f"engines take the embedding for the head in the family {self.arch.gguf}")
        if not own and self.family.head == "own":
            self.faults.append(f"engines need a head tensor in the family {self.arch.gguf}, and it is tied")

    def _note_about(self, jobs: list[GgufJob]) -> None:
        left = [n for n in self.artifact.names() if n not in set(self.names.values())]
        if left:
            self.notes.append(f"{len(left)} tensors are not part of the GGUF, the first is {left[0]}")
        self.notes += attention_notes(self.config, str(self.arch.gguf))
        self._note_fused(jobs)
        self._note_growth(jobs)
        kinds = sorted({job.kind.name for job in jobs}, key=lambda k: -BLOCK_TYPES[k].bits_per_weight)
        special = {k: _READERS[k] for k in kinds if k in _READERS}
        readers = "; ".join(f"{k}: {who}" for k, who in special.items())
        self.notes += [f"{why}: {listed(names, 4)}" for why, names in self.others.items()]
        self.notes.append(f"types {', '.join(kinds)}; runs in " + (readers or "llama.cpp and what embeds it"))
        if self.folded:
            self.notes.append("the weights are rotated: only engines that know prism.hadamard undo it")

    def _note_fused(self, jobs: list[GgufJob]) -> None:
        kinds = {job.origin[1]: job.kind.name for job in jobs if job.origin and len(job.shape) > 1}
        roles = {(r.layer, r.part): kinds.get(n) for r, n in self.names.items() if r.kind == r.part}
        for layer in range(self.config.num_hidden_layers):
            for group in _FUSED:
                found = {roles[layer, part] for part in group if roles.get((layer, part))}
                if len(found) > 1:
                    self.notes.append(
                        f"{', '.join(group)} of layer {layer} (perhaps more) have different types, which engines "
                        "that fuse them refuse; a named --gguf-type gives them one"
                    )
                    return

    def _note_growth(self, jobs: list[GgufJob]) -> None:
        records = self.records
        if self.asked != AUTO or not self.fitted or self.request.source is not None:
            return
        before = sum(records[n].nbytes for n in self.names.values())
        after = sum(job.nbytes for job in jobs)
        if after <= _NOTABLE_GROWTH * before:
            return
        quantized = [records[n] for n in self.names.values() if records[n].layout != DenseTensor.layout]
        bits = 8 * sum(r.nbytes for r in quantized) / sum(r.parameters for r in quantized)
        width = min(r.shape[-1] for r in quantized)
        fitting = [k for k in FITTED_NAMES if width % BLOCK_TYPES[k].block_size == 0] or ["F16"]
        near = max(
            (k for k in fitting if BLOCK_TYPES[k].bits_per_weight <= bits),
            key=lambda k: BLOCK_TYPES[k].bits_per_weight,
            default=fitting[0],
        )
        self.notes.append(
            f"keeping the artifact's accuracy takes {after / before:.2f} times its bytes, because GGUF has no "
            "codebooks; a file of its size comes straight from the model: "
            f"trapetum quantize {model_title(self.request.artifact)} --scheme gguf:{near} -o DIR"
        )


def _refuse_existing(request: ExportRequest) -> None:
    out = request.out
    if not is_file(out):
        refuse_existing(out, _KNOWN, overwrite=request.overwrite)
        return
    if not is_listable(out.name):
        raise OutputError(
            f"{out}: the file's name is not UTF-8 or has a line break, which no list of checksums holds",
            hint="Choose another name with -o.",
        )
    if not request.overwrite and (found := [*family(out), *filter(Path.exists, [gguf_sums(out)])]):
        raise OutputError(
            f"{found[0]}: exists", hint="Give --overwrite to replace the model, or another name with -o."
        )
