"""`vbs checkpoint` and `vbs goodput`: what checkpoints hold, whether they are intact, and how time was spent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from variable_batch_size._validation import value_error
from variable_batch_size.cli import output
from variable_batch_size.cli.command import command
from variable_batch_size.cli.group import Commands
from variable_batch_size.cli.options import option

_OF_RATES = ("rule", "ref_batchsize", "progress", "last_rates")  # of the state of an optimizer

app = typer.Typer(cls=Commands, help="Checkpoints: what they hold, and whether they are intact.", no_args_is_help=True)

Source = Annotated[
    str,
    typer.Argument(help="Folder or URL of a training, or a checkpoint in it.", metavar="FOLDER", show_default=False),
]


@app.command()
@command
def show(folder: Source, json: output.Json = False) -> None:
    """List the checkpoints of a training, or the states that one of them holds.

    Examples:

    - `vbs checkpoint show runs/a`
    - `vbs checkpoint show runs/a/update-00001234`
    """
    from variable_batch_size.checkpoint.manifest import facts_of
    from variable_batch_size.checkpoint.object_store import folder_at

    found = [*_manifests(folder)]
    manifests = {path.name: manifest for path, manifest in found}
    one = found[0][1] if str(found[0][0]) == folder.rstrip("/") else None
    if json:
        kept = {name: None if manifest is None else facts_of(manifest) for name, manifest in manifests.items()}
        output.print_json(kept if one is None else facts_of(one) | _rates(one))
        return
    if one is not None:
        _show_states(one)
        return
    rows, best = [], folder_at(folder).ranked()[:1]
    for path, manifest in found:
        if manifest is None:
            rows.append([path.name, *["?"] * 5, "", "damaged"])
            continue
        numbers = [output.number(manifest.get(key, 0)) for key in ("updates", "samples", "epoch", "world")]
        metrics = ", ".join(f"{key} {value}" for key, value in manifest.get("metrics", {}).items())
        size = _size(sum(file["bytes"] for file in manifest["files"]))
        remark = "" if _has_all_bytes(path, manifest) else "damaged"
        rows.append([path.name, *numbers, size, metrics, remark or "best" * (path in best)])
    output.print_table(["checkpoint", "updates", "samples", "epoch", "ranks", "size", "reported", ""], rows)


def _show_states(manifest: dict[str, Any]) -> None:
    from variable_batch_size.checkpoint.manifest import facts_of

    output.print_facts({name: str(value) for name, value in (facts_of(manifest) | _rates(manifest)).items()})
    rows = []
    for part in manifest["state"]:
        own = [one for name, one in manifest["tensors"].items() if name.split("/", 1)[0] == part]
        size = sum(chunk["end"] - chunk["begin"] for one in own for chunk in one["chunks"])
        rows.append([part, output.number(len(own)), _size(size)])
    output.print_table(["state", "tensors", "size"], rows)


def _rates(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the learning rates of a checkpoint, and what they follow from."""
    state = manifest["state"].get("optimizer", {})
    own = {name: value for name, value in state.get("vbs", {}).items() if name in _OF_RATES}
    return {"reference_lr": [group.get("lr") for group in state.get("param_groups", ())], **own}


def _has_all_bytes(path: Path, manifest: dict[str, Any]) -> bool:
    """Return whether the files are as large as they were; `verify` reads them."""
    try:
        return all((path / file["name"]).stat().st_size == file["bytes"] for file in manifest["files"])
    except OSError:
        return False


@app.command()
@command
def verify(folder: Source, json: output.Json = False) -> None:
    """Read checkpoints and compare all checksums; the exit status is 1 if one is damaged.

    Example: `vbs checkpoint verify runs/a`
    """
    from variable_batch_size.checkpoint.reading import read_verified

    damages: dict[str, str | None] = {}
    for path, _ in _manifests(folder):
        try:
            read_verified(path)
            damages[str(path)] = None
        except ValueError as error:
            damages[str(path)] = str(error)
        if not json:
            typer.echo(f"{path}: {damages[str(path)] or 'intact'}")
    if json:
        output.print_json(damages)
    if any(damages.values()):
        raise typer.Exit(1)


@app.command(name="to-torch")
@command
def to_torch(
    folder: Source,
    file: Annotated[Path, typer.Argument(help="Written by torch.save.", metavar="FILE", show_default=False)],
    best: Annotated[bool, option("Take the checkpoint with the best reported value.", "--best")] = False,
) -> None:
    """Write the states of the newest intact checkpoint as `torch.save` does, for torch's own `load_state_dict()`.

    Example: `vbs checkpoint to-torch runs/a model.pt`
    """
    from variable_batch_size.checkpoint.conversion import to_torch

    output.write(file, lambda path: to_torch(folder, path, best=best), "written")


@app.command(name="from-torch")
@command
def from_torch(
    file: Annotated[Path, typer.Argument(help="A dict of state dicts.", metavar="FILE", show_default=False)],
    folder: Annotated[str, typer.Argument(help="Folder or URL of a training.", metavar="FOLDER", show_default=False)],
) -> None:
    """Write a checkpoint from which a training begins, from `torch.save({"model": ..., "optimizer": ...}, file)`.

    `restore(strict=False)` loads it.

    Example: `vbs checkpoint from-torch model.pt runs/b`
    """
    from variable_batch_size.checkpoint.conversion import from_torch

    typer.echo(f"{from_torch(file, folder)}: written")


@command
def goodput(
    folder: Source,
    json: output.Json = False,
) -> None:
    """Print for how long a training made updates that count, made lost ones again, saved, restored, or was down.

    Beside them, what `vbs simulate` needs for `--restart` and `--save`.

    Example: `vbs goodput runs/a`
    """
    from variable_batch_size.checkpoint.events import FILE, Goodput, read
    from variable_batch_size.checkpoint.object_store import path_of

    if not (events := read(path_of(folder))):
        raise value_error(f"FOLDER must have the {FILE} of a vbs.Checkpoint", folder, "pass its folder")
    spent = Goodput.of(events)
    if json:
        output.print_json({**spent._asdict(), "total": spent.total, "restart": spent.restart, "save": spent.save})
        return
    total = max(spent.total, 1e-9)
    parts = {name: value for name, value in spent._asdict().items() if isinstance(value, float)} | {
        "total": spent.total
    }
    rows = [[name, output.duration(value), f"{100 * value / total:.1f} %"] for name, value in parts.items()]
    output.print_table(["", "time", "share"], rows)
    flags = f"--restart {spent.restart:.1f} --save {spent.save:.2f}"
    typer.echo(f"{spent.runs} runs, {spent.saves} saves; for vbs simulate: {flags}")


def _manifests(folder: str) -> Iterator[tuple[Path, dict[str, Any] | None]]:
    """Yield the checkpoints in a folder, or the one that it is, newest first; None for a damaged manifest."""
    from variable_batch_size.checkpoint.manifest import DAMAGE, sealed_manifest
    from variable_batch_size.checkpoint.object_store import folder_at

    place = folder_at(folder)
    for path in [entry.path for entry in place.entries()] or [place.path]:
        try:
            yield path, sealed_manifest(path)
        except DAMAGE as error:
            if path == place.path:
                requirement = "FOLDER must be the folder of a training with checkpoints, or a checkpoint"
                why = "which has none" if isinstance(error, OSError) else f"which is damaged: {error}"
                raise value_error(requirement, f"{folder}, {why}", "pass another one") from None
            yield path, None


def _size(count: int) -> str:
    """Return a number of bytes as text.

    >>> _size(1234567)
    '1.2 MB'
    """
    size, units = float(count), iter(("bytes", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while size >= 1000:
        size, unit = size / 1000, next(units)
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
