"""`vbs checkpoint` and `vbs goodput`: what checkpoints hold, whether they are intact, and how time was spent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from variable_batch_size._validation import value_error
from variable_batch_size.cli import output
from variable_batch_size.cli.command import command
from variable_batch_size.cli.group import Commands
from variable_batch_size.cli.options import option

if TYPE_CHECKING:
    from variable_batch_size.checkpoint.folder import Folder

_REQUIREMENT = "FOLDER must be the folder of a run with checkpoints, or a checkpoint"
_SCALING = ("rule", "ref_batchsize", "progress")  # of the state of an optimizer

app = typer.Typer(cls=Commands, help="Checkpoints: what they hold, and whether they are intact.", no_args_is_help=True)

Source = Annotated[
    str,
    typer.Argument(help="Folder or URL of a run, or a checkpoint in it.", metavar="FOLDER", show_default=False),
]


@app.command()
@command
def show(folder: Source, json: output.Json = False) -> None:
    """List the checkpoints of a run, or the states that one of them holds, with the hash of its weights.

    A list compares the sizes of files; `verify` reads them.

    Examples:

    - `vbs checkpoint show runs/a`
    - `vbs checkpoint show runs/a/update-00001234-0001-7-2`
    """
    from variable_batch_size.checkpoint.contents import DamagedError, facts_of, read_manifests
    from variable_batch_size.checkpoint.names import weights_hash
    from variable_batch_size.checkpoint.reading import read_contents

    checkpoints, names, is_one = _open(folder)
    listed, weights = dict[str, list[dict[str, Any]]](), ""
    for name in names:
        try:
            listed[name] = read_manifests(checkpoints.storage, name)
            if is_one:
                contents = read_contents(checkpoints.storage, name, only="model")
                weights = weights_hash(contents.parts["model"])
        except DamagedError as error:
            if is_one:
                raise value_error(_REQUIREMENT, f"{folder}, which is damaged: {error}", "pass another one") from None
            listed[name] = []
    if is_one:
        (ranks,) = listed.values()
        facts = facts_of(ranks[0]) | _learning_rates(ranks[0]) | {"weights": weights}
        if json:
            output.print_json(facts)
        else:
            _show_states(facts, ranks)
    elif json:
        output.print_json({name: facts_of(ranks[0]) if ranks else None for name, ranks in listed.items()})
    else:
        _show_list(checkpoints, listed)


def _show_list(checkpoints: Folder, listed: dict[str, list[dict[str, Any]]]) -> None:
    """Print a table of the checkpoints of a folder, also of those that are damaged or incomplete.

    Args:
        checkpoints: the folder.
        listed: the JSON of each rank by the name of a checkpoint; an empty list for a damaged one.
    """
    rows = []
    best = checkpoints.best_first()[:1]
    for name, ranks in listed.items():
        if not ranks:
            rows.append([name, *["?"] * 5, "", "damaged"])
            continue
        numbers = [output.format_number(ranks[0].get(key, 0)) for key in ("updates", "samples", "epoch", "world")]
        metrics = ", ".join(f"{key} {value}" for key, value in ranks[0].get("metrics", {}).items())
        size = _format_bytes(sum(manifest["file"]["bytes"] for manifest in ranks if manifest["file"]))
        remark = "best" if name in best else ""
        if not _has_all_bytes(checkpoints, name, ranks):
            remark = "damaged"
        rows.append([name, *numbers, size, metrics, remark])
    rows += [[name, *["?"] * 5, "", "incomplete"] for name in checkpoints.incomplete()]
    output.print_table(["checkpoint", "updates", "samples", "epoch", "ranks", "size", "reported", ""], rows)


def _show_states(facts: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    """Print facts of one checkpoint, and a table of its states, such as "model": how many tensors and bytes each has.

    Args:
        facts: what the checkpoint says of the training.
        ranks: the JSON of each rank.
    """
    manifest_of_rank_0 = ranks[0]
    output.print_facts({name: str(value) for name, value in facts.items()})
    files = [manifest["file"] for manifest in ranks if manifest["file"]]
    chunks = [named_chunk for file in files for named_chunk in file["chunks"].items()]
    rows = []
    for state in manifest_of_rank_0["state"]:  # such as "model", whose tensors are named model/...
        size = sum(chunk["end"] - chunk["begin"] for name, chunk in chunks if name.split("/", 1)[0] == state)
        num_tensors = sum(name.split("/", 1)[0] == state for name in manifest_of_rank_0["tensors"])
        rows.append([state, output.format_number(num_tensors), _format_bytes(size)])
    output.print_table(["state", "tensors", "size"], rows)


def _learning_rates(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the learning rates of a checkpoint before scaling, one a parameter group, and what scales them."""
    state = manifest["state"].get("optimizer", {})
    ours = state.get("vbs", {})
    facts = {"reference_lr": [group.get("lr") for group in state.get("param_groups", ())]}
    facts |= {name: ours[name] for name in _SCALING if name in ours}
    if last := ours.get("last_rates"):  # of the first group
        facts |= {"last_lr": last["reference_lr"] * last["lr"], "last_lr_factor": last["lr"]}
    return facts


def _has_all_bytes(checkpoints: Folder, name: str, ranks: list[dict[str, Any]]) -> bool:
    """Return whether the files of a checkpoint have the sizes that were saved: a quick check, which reads none."""
    try:
        files = [(rank, manifest["file"]) for rank, manifest in enumerate(ranks) if manifest["file"]]
        size = checkpoints.storage.size
        return all(size(name, f"tensors-{rank}.safetensors") == facts["bytes"] for rank, facts in files)
    except OSError:
        return False


@app.command()
@command
def verify(folder: Source, json: output.Json = False) -> None:
    """Read checkpoints and compare all checksums; the exit status is 1 if one is damaged, or a saved one is missing.

    Example: `vbs checkpoint verify runs/a`
    """
    from variable_batch_size.checkpoint.contents import DamagedError
    from variable_batch_size.checkpoint.contents import verify as read_all

    checkpoints, names, is_one = _open(folder)
    damages: dict[str, str | None] = {}
    for name in names:
        path = checkpoints.storage.at(name)
        try:
            read_all(checkpoints.storage, name)
            damages[path] = None
        except DamagedError as error:
            damages[path] = str(error)
        if not json:
            typer.echo(f"{path}: {damages[path] or 'intact'}")
    lost = {} if is_one else checkpoints.lost() | checkpoints.lost(best=True)
    damages |= {checkpoints.storage.at(name): f"{reason}, and it was saved" for name, reason in lost.items()}
    incomplete = [] if is_one else [name for name in checkpoints.incomplete() if name not in lost]
    if json:
        output.print_json(damages)
    else:
        for name in [*lost, *incomplete]:  # incomplete, as a killed process leaves one
            path = checkpoints.storage.at(name)
            typer.echo(f"{path}: {damages.get(path, 'incomplete')}")
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


@app.command(name="to-safetensors")
@command
def to_safetensors(
    folder: Source,
    file: Annotated[Path, typer.Argument(help="Written by safetensors.", metavar="FILE", show_default=False)],
    best: Annotated[bool, option("Take the checkpoint with the best reported value.", "--best")] = False,
) -> None:
    """Write the weights of the newest intact checkpoint, whole, under the model's own names.

    `safetensors.torch.load_file(file)` returns them for `model.load_state_dict()`, without this library.

    Example: `vbs checkpoint to-safetensors runs/a model.safetensors`
    """
    from variable_batch_size.checkpoint.conversion import to_safetensors

    output.write(file, lambda path: to_safetensors(folder, path, best=best), "written")


@app.command(name="from-torch")
@command
def from_torch(
    file: Annotated[Path, typer.Argument(help="A dict of state dicts.", metavar="FILE", show_default=False)],
    folder: Annotated[str, typer.Argument(help="Folder or URL of a run.", metavar="FOLDER", show_default=False)],
) -> None:
    """Write a checkpoint from which a run starts, from `torch.save({"model": ..., "optimizer": ...}, file)`.

    `restore(strict=False)` loads it.

    Example: `vbs checkpoint from-torch model.pt runs/b`
    """
    from variable_batch_size.checkpoint.conversion import from_torch

    typer.echo(f"{from_torch(file, folder)}: written")


@command
def goodput(folder: Source, json: output.Json = False) -> None:
    """Print for how long a run made updates that count, repeated lost ones, saved, restored, or was down.

    Beside them, what `vbs simulate` needs for `--restart` and `--save`.

    Example: `vbs goodput runs/a`
    """
    from variable_batch_size.checkpoint.events import FILE, read_events
    from variable_batch_size.checkpoint.storage import Storage
    from variable_batch_size.lab.simulation.goodput import TimeSpent

    events = read_events(Storage(folder))
    if not events:
        raise value_error(f"FOLDER must have the {FILE} of a vbs.Checkpoint", folder, "pass its folder")
    spent = TimeSpent.from_events(events)
    if json:
        output.print_json({**spent._asdict(), "total": spent.total, "restart": spent.restart, "save": spent.save})
        return
    total = max(spent.total, 1e-9)
    times = {name: value for name, value in spent._asdict().items() if isinstance(value, float)}  # others are counts
    times["total"] = spent.total
    rows = [[name, output.format_duration(value), f"{100 * value / total:.1f} %"] for name, value in times.items()]
    output.print_table(["", "time", "share"], rows)
    flags = f"--restart {spent.restart:.1f} --save {spent.save:.2f}"
    typer.echo(f"{spent.runs} runs, {spent.saves} saves; for vbs simulate: {flags}")


def _open(folder: str) -> tuple[Folder, list[str], bool]:
    """Open the folder that a path of the command line names, of a training or of one checkpoint in it.

    Returns:
        The folder, the names of its checkpoints, newest first, and whether the path is such a checkpoint.
    """
    from variable_batch_size.checkpoint.reading import open_folder

    checkpoints, names, is_one = open_folder(folder)
    if not names:
        what = "only incomplete ones" if checkpoints.incomplete() else "none"
        raise value_error(_REQUIREMENT, f"{folder}, which has {what}", "pass another one")
    return checkpoints, names, is_one


def _format_bytes(count: int) -> str:
    """Return a number of bytes as text.

    >>> _format_bytes(1234567)
    '1.2 MB'
    """
    size = float(count)
    units = iter(("bytes", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while size >= 1000:
        size = size / 1000
        unit = next(units)
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
