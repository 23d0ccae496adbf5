"""An artifact -> a model repository on the Hub: one commit of the files that its checksums list, and its card.

``run.jsonl`` stays here (it names the host). The card gains what is only known now: the command, measured quality. What
is pushed was checked against its checksums before, and what arrived is compared with them after. A push that was cut
off is given again: files that the Hub already has are not sent twice.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trapetum.errors import OutputError, RecipeError, TrapetumError
from trapetum.formats.artifact import Artifact
from trapetum.formats.checksums import parse_sums, sums_bytes
from trapetum.formats.manifest import MANIFEST, SUMS, is_plain_name
from trapetum.formats.strict_json import shown
from trapetum.hub_errors import explained, with_retries
from trapetum.measured import measured_rows
from trapetum.progress import Progress

if TYPE_CHECKING:
    from huggingface_hub import HfApi

__all__ = ["PushReport", "push_artifact"]

LARGEST = 50 * 10**9  # bytes that the Hub takes in one file
_CARD = "README.md"


@dataclass(frozen=True)
class PushReport:
    """What was pushed, or would be.

    Parameters
    ----------
    repo : str
    files : dict of str to int
        Name -> bytes.
    removed : tuple of str
        Files of an earlier push that are no part of this one.
    card : str
        README.md as it is pushed.
    dry_run : bool
    url, commit : str or None
        Of the commit or pull request.
    notes : tuple of str
    """

    repo: str
    files: Mapping[str, int]
    removed: tuple[str, ...]
    card: str
    dry_run: bool
    url: str | None = None
    commit: str | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "repo": self.repo,
            "dry_run": self.dry_run,
            "files": dict(self.files),
            "bytes": sum(self.files.values()),
            "removed": list(self.removed),
            "url": self.url,
            "commit": self.commit,
            "card": self.card,
            "notes": list(self.notes),
        }


def push_artifact(
    path: str | Path,
    repo: str,
    *,
    private: bool = False,
    create_pr: bool = False,
    dry_run: bool = False,
    base_model: str | None = None,
    quality: Sequence[str | Path] = (),
    token: str | None = None,
    progress: Progress | None = None,
) -> PushReport:
    """Push a finished artifact.

    Parameters
    ----------
    path : path
        The artifact's folder.
    repo : str
        ``org/name`` or ``name``; created if it is not there, unless a pull request is wanted.
    private : bool
        For a repository that is created; one that is there and public is refused.
    create_pr : bool
        Open a pull request instead of committing to the main branch.
    dry_run : bool
        Reach no network: the report lists files and sizes, and holds the card.
    base_model : str, optional
        Hub id of the source, where the artifact was made from a local folder.
    quality : sequence of path
        JSON that ``perplexity``, ``compare`` or ``verify`` printed with ``--json``; becomes a table of the card.
    token : str, optional
        By default what the Hub client finds by itself.
    progress : Progress, optional

    Raises
    ------
    OutputError
        If the artifact is damaged, the repository holds other weights or is public against ``private``, or the Hub
        does not take it.
    RecipeError
        If both ``private`` and ``create_pr`` are set: a pull request creates nothing.
    FormatError
        If ``path`` is no artifact.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    path = Path(path)
    progress = progress or Progress()
    if private and create_pr:
        raise RecipeError(
            "private and create_pr exclude each other: a pull request goes to a repository that exists"
        )
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise explained(repo, repo, error, OutputError, "upload") from None
    with Artifact.open(path) as artifact:
        if problems := artifact.check_sums(progress):
            raise OutputError(
                f"{path}: is damaged and not pushed: {problems[0]}", hint=f"See trapetum verify {path}."
            )
        manifest = artifact.manifest
    sums = parse_sums(path / SUMS)
    for name in sums:
        if not is_plain_name(name) or not (path / name).is_file():
            raise OutputError(
                f"{path / SUMS}: lists {shown(name)}, which is not there", hint=f"See trapetum verify {path}."
            )
    card = _card(path, manifest, base_model, quality)
    contents: dict[str, bytes] = {_CARD: card.encode()}
    report = _sized(path, repo, sums, contents, dry_run)
    if dry_run:
        return report
    return _send(path, report, sums, contents, private, create_pr, token, progress)


def _sized(
    path: Path, repo: str, sums: Mapping[str, str], contents: dict[str, bytes], dry: bool
) -> PushReport:
    """The files of the push; puts the SHA256SUMS that lists them into ``contents``."""
    digests = {**sums, **{n: hashlib.sha256(data).hexdigest() for n, data in contents.items()}}
    contents[SUMS] = sums_bytes(digests)
    files = {
        n: len(contents[n]) if n in contents else (path / n).stat().st_size for n in [*sorted(digests), SUMS]
    }
    largest = max(files, key=lambda n: files[n])
    if files[largest] > LARGEST:
        raise OutputError(
            f"{path / largest}: is {files[largest]:,} bytes; the Hub takes at most {LARGEST:,} in one file",
            hint="Quantize again with a smaller --max-shard-size.",
        )
    return PushReport(repo, files, (), contents[_CARD].decode(), dry)


def _send(
    path: Path,
    report: PushReport,
    sums: Mapping[str, str],
    contents: dict[str, bytes],
    private: bool,
    create_pr: bool,
    token: str | None,
    progress: Progress,
) -> PushReport:
    import huggingface_hub
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    repo = report.repo
    api = HfApi(token=token, library_name="trapetum")
    silent = are_progress_bars_disabled()
    disable_progress_bars()
    notes: list[str] = []
    try:
        if not create_pr:
            created = with_retries(
                lambda: api.create_repo(repo, private=private or None, exist_ok=True), repo, progress
            )
            repo = created.repo_id
        present = _present(api, repo, private, progress)
        removed = _removed(repo, present, report.files)
        if _CARD in present and _is_foreign(api, repo, progress):
            notes.append(f"{repo}: keeps its own {_CARD}, which trapetum did not write")
            del contents[_CARD]
            contents[SUMS] = sums_bytes({n: d for n, d in sums.items() if n != _CARD})
        names = [n for n in report.files if n != _CARD or _CARD in contents]
        progress.note(
            f"pushing {len(names)} files to {repo}; those that the Hub already has are not sent again"
        )

        def commit() -> huggingface_hub.CommitInfo:
            return api.create_commit(
                repo,
                [
                    *(CommitOperationAdd(n, contents.get(n, path / n)) for n in names),
                    *(CommitOperationDelete(n) for n in removed),
                ],
                commit_message="Upload a quantized model",
                create_pr=create_pr,
            )

        # Two commits of the same files are one, but two pull requests are two.
        info = with_retries(commit, repo, progress, only_refused=create_pr)
        _compare(api, repo, info.oid, {n: report.files[n] for n in names}, sums, contents, progress)
    except TrapetumError:
        raise
    except Exception as error:
        raise explained(repo, repo, error, OutputError, "upload") from None
    finally:
        if not silent:
            enable_progress_bars()
    sizes = {n: len(contents[n]) if n in contents else report.files[n] for n in names}
    return PushReport(
        repo,
        sizes,
        tuple(removed),
        report.card,
        False,
        info.pr_url or info.commit_url,
        info.oid,
        tuple(notes),
    )


def _present(api: HfApi, repo: str, private: bool, progress: Progress) -> list[str]:
    """Files of the repository; one that was there before stays as public as it is, whatever was asked for."""
    info = with_retries(lambda: api.model_info(repo), repo, progress)
    if private and info.private is False:
        raise OutputError(
            f"{repo}: is there already, and public",
            hint="Make it private in its settings, push to another name, or leave --private out.",
        )
    return [s.rfilename for s in info.siblings or []]


def _removed(repo: str, present: Sequence[str], files: Mapping[str, int]) -> list[str]:
    """Weight files of an earlier push; another's weights stop this one."""
    weights = [
        n
        for n in present
        if n.endswith((".safetensors", ".bin", ".gguf")) and "/" not in n and n not in files
    ]
    if weights and MANIFEST not in present:
        raise OutputError(
            f"{repo}: holds other weights ({weights[0]}), which a loader could take instead",
            hint="Push to a repository of its own.",
        )
    return [n for n in weights if n.endswith(".safetensors")]


def _is_foreign(api: HfApi, repo: str, progress: Progress) -> bool:
    """Whether the card in the repository is a person's."""
    with tempfile.TemporaryDirectory(prefix="trapetum-push-") as folder:
        file = with_retries(lambda: api.hf_hub_download(repo, _CARD, local_dir=folder), repo, progress)
        text = Path(file).read_text(encoding="utf-8", errors="replace")
    return bool(text.strip()) and not re.search(r'^library_name: "?trapetum"?$', text, re.MULTILINE)


def _compare(
    api: HfApi,
    repo: str,
    commit: str,
    sizes: Mapping[str, int],
    sums: Mapping[str, str],
    contents: Mapping[str, bytes],
    progress: Progress,
) -> None:
    """What arrived must be what was sent: sizes of all files, SHA-256 of the large ones."""
    info = with_retries(lambda: api.model_info(repo, revision=commit, files_metadata=True), repo, progress)
    there = {s.rfilename: s for s in info.siblings or []}
    for name, size in sizes.items():
        size = len(contents[name]) if name in contents else size
        sibling = there.get(name)
        if sibling is None or sibling.size != size:
            found = "is not there" if sibling is None else f"has {sibling.size} bytes"
            raise OutputError(f"{repo}: after the push {name} {found}; {size} were sent", hint="Push again.")
        digest = sibling.lfs.sha256 if sibling.lfs is not None else None
        if name in sums and name not in contents and digest not in (None, sums[name]):
            raise OutputError(f"{repo}: after the push {name} has sha256 {digest}; {sums[name]} was sent")


def _card(
    path: Path, manifest: Mapping[str, Any], base_model: str | None, quality: Sequence[str | Path]
) -> str:
    """README.md of the artifact, completed."""
    from trapetum.quantize.command import manifest_command

    text = (path / _CARD).read_text(encoding="utf-8", errors="replace") if (path / _CARD).is_file() else ""
    if base_model is not None:
        head = re.sub(
            r"^base_model(_relation)?:.*\n", "", text.partition("\n---\n")[0] + "\n", flags=re.MULTILINE
        )
        head += f'base_model: {json.dumps(base_model)}\nbase_model_relation: "quantized"'
        text = f"{head}\n---\n{text.partition(chr(10) + '---' + chr(10))[2]}"
    lines = [text.rstrip("\n"), ""]
    command = manifest_command(manifest, base_model)
    lines += ["## Made with", "", "```", f"# trapetum {manifest.get('tool_version')}", command, "```"]
    if "--recipe recipe.json" in command:
        lines += ["", f"`recipe.json` is the value of `recipe` in `{MANIFEST}`."]
    rows = [f"| {text} | {value} |" for text, value in measured_rows(quality)]
    if rows:
        lines += ["", "## Quality", "", "| | |", "|---|---:|", *rows]
    return "\n".join(lines) + "\n"
