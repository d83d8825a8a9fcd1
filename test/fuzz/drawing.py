"""From a seed to a case, dimension by dimension."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fuzz.case import (
    NOISE_RULES,
    OPTIMIZERS,
    RULES,
    SQUARES_RULE,
    AverageCase,
    Case,
    Draw,
    Event,
    RuleCase,
    SavesCase,
    Segment,
)
from fuzz.plan import Asked, TraceCase, planned_updates

MOST_MICROBATCHES = 60  # of a training, so that a case takes milliseconds


def draw_case(seed: int, without: frozenset[str] = frozenset()) -> Case:
    """The training of a seed."""
    draw = Draw(seed, without)
    dataset_size = draw.integer("dataset size", 5, draw.choice("largest dataset", [12, 30, 60]))
    epochs, drop_last = draw.integer("epochs", 1, 3), draw.choice("drop_last", [False, False, True])
    trace = _trace(draw, dataset_size, epochs, drop_last)
    shuffle, sampler_seed = draw.choice("shuffle", [True, True, False]), draw.choice("sampler seed", [0, 1, 2**64 - 1])
    while True:
        planned = planned_updates(trace, dataset_size, epochs, drop_last=drop_last, shuffle=shuffle, seed=sampler_seed)
        if len(planned) <= MOST_MICROBATCHES or epochs == 1:
            break
        epochs -= 1
    low_precision = draw.feature("low_precision")
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float16] if low_precision else [torch.float64]
    dtype = draw.choice("dtype", dtypes)
    ends = _ends(draw, trace, len(planned), sum(len(update.samples) for update in planned))
    options: dict[str, Any] = {"drop_last": drop_last, "shuffle": shuffle, "seed": sampler_seed}
    planned = planned_updates(trace, dataset_size, epochs, **options, **ends)
    small = dtype.itemsize == 2
    optimizer = "SGD" if small else draw.choice("optimizer", OPTIMIZERS)
    group_count = 1 + draw.feature("groups")
    largest = max(trace.sizes)
    reference = draw.integer("reference", max(1, largest // 4), 2 * largest)
    intermittent = frozenset(part for part in ("rare", "alternate") if draw.feature(part))
    scales_betas = optimizer in ("Adam", "AdamW", "RMSprop") and draw.feature("rare_betas", bool(intermittent))
    rules = _rules(draw, optimizer, group_count, noise=not small, betas=scales_betas or not intermittent)
    measured = any(rule.name in NOISE_RULES for rule in rules)
    noises = ["microbatches", "differenced"] if measured else [None, None, None, "microbatches", "differenced"]
    noise = None if small else draw.choice("noise", [None, *noises])
    measured = measured or noise is not None
    squares = any(rule.name == SQUARES_RULE for rule in rules)
    compared = measured or squares  # whether microbatches are
    parts = intermittent | {
        part for part in ("unused", "frozen", "tied", "dropout", "batchnorm") if draw.feature(part, not small)
    }
    fixed_shape = not draw.feature("cut")
    counts = draw.feature("counts", not compared)
    minibatch_size = _minibatch_size(draw, planned)
    reference = max(reference, minibatch_size) if squares else reference
    segments = _segments(draw, len(planned), fixed_shape, minibatch_size, compared)
    case = Case(
        seed=seed,
        without=without,
        dataset_size=dataset_size,
        trace=trace,
        epochs=epochs,
        drop_last=drop_last,
        shuffle=shuffle,
        sampler_seed=sampler_seed,
        fixed_shape=fixed_shape,
        segments=segments,
        events=(),
        parts=parts,
        dtype=dtype,
        optimizer=optimizer,
        groups=tuple(_hyperparameters(draw, optimizer, group, largest / reference) for group in range(group_count)),
        rules=rules,
        ref_batchsize=reference,
        noise=noise,
        max_grad_norm=draw.number("max_grad_norm", 0.05, 3) if draw.feature("clipping", not small) else None,
        reduction="sum" if counts else draw.choice("reduction", ["mean", "sum"]),
        clears=draw.feature("clears"),
        loss_scale=draw.choice("loss scale", [1e-6, 1e-3, 8.0]) if draw.feature("loss_scale", not small) else 1.0,
        decay=0.97 if draw.feature("schedule") else 1.0,
        poisoned=draw.integer("poisoned", 0, dataset_size - 1) if draw.feature("poison", measured) else None,
        zero_grad=draw.choice("when zero_grad", ["before", "after"]) if draw.feature("zero_grad") else "never",
        # A world of one takes it too; without it, in a larger world, the first change of gradients raises.
        find_unused=bool(intermittent)
        and max(segment.world for segment in segments) > 1
        and (len(segments) > 1 or draw.choice("find_unused", [True, True, False])),
        optimizer_first=draw.choice("optimizer first", [True, False]),
        host_dropout=all(segment.world == 1 for segment in segments),
        **ends,
        by_update=draw.feature("by_update"),
        backward=draw.feature("backward"),
        closure=draw.feature("closure"),
        logs=draw.feature("log"),
        counts=counts,
        average=_average(draw),
        saves=_saves(draw),
    )
    return replace(case, events=_events(draw, case), used=frozenset(draw.used))


def _trace(draw: Draw, dataset_size: int, epochs: int, drop_last: bool) -> TraceCase:
    trace = _fixed_trace(draw, dataset_size, epochs, drop_last)
    if not draw.feature("controller", trace.on_end in ("hold", "cycle")):
        return trace
    start = draw.choice("start", [None, trace.sizes[0]])
    asked = Asked(draw.integer("every", 1, 9), draw.integer("delay", 9, 20), start)
    return replace(trace, asked=asked)


def _fixed_trace(draw: Draw, dataset_size: int, epochs: int, drop_last: bool) -> TraceCase:
    kind = draw.choice("trace", ["constant", "list", "list", "list", "schedule"])
    largest = draw.integer("largest batch", max(1, dataset_size // 8), min(dataset_size, 40))
    rng = draw.rng("sizes")
    sizes = tuple(rng.randint(1, largest) for _ in range(rng.randint(1, 6)))
    if kind == "constant":
        return TraceCase(kind, sizes[:1], "hold")
    if kind == "schedule":
        runs = [size for size in sizes for _ in range(rng.randint(1, 3))]
        return TraceCase(kind, tuple(runs), "hold")
    trace = TraceCase(kind, sizes, draw.choice("on_end", ["error", "hold", "cycle"]))
    if trace.on_end != "error":
        return (
            trace
            if not draw.feature("ends")
            else replace(trace, on_end=draw.choice("end of trace", ["stop", trace.on_end]))
        )
    # As many steps as the training needs; with drop_last the step that does not fit is read too.
    cycled = replace(trace, on_end="cycle")
    planned = planned_updates(cycled, dataset_size, epochs, drop_last=drop_last, shuffle=False, seed=0)
    steps = len(planned) + (1 if drop_last else draw.choice("steps to spare", [0, 0, 3]))
    return replace(trace, sizes=tuple(cycled.batch_size(step) for step in range(steps)))


def _ends(draw: Draw, trace: TraceCase, updates: int, samples: int) -> dict[str, int | None]:
    """An end before the last epoch's."""
    if not draw.feature("ends"):
        return {"max_updates": None, "max_samples": None}
    kind = draw.choice("end", ["updates", "samples", "both"])
    return {
        "max_updates": None if kind == "samples" else draw.integer("max_updates", 1, updates + 2),
        "max_samples": None if kind == "updates" else draw.integer("max_samples", 1, samples + 5),
    }


def _average(draw: Draw) -> AverageCase | None:
    if not draw.feature("average"):
        return None
    return AverageCase(draw.number("decay of averages", 0, 0.99), draw.choice("averages by", ["progress", "samples"]))


def _saves(draw: Draw) -> SavesCase | None:
    if not draw.feature("checkpoint"):
        return None
    every, mode = draw.choice("every", [None, 1, 2, 3]), draw.choice("best", [None, "min", "max"])
    return SavesCase(draw.integer("keep", 1, 3), every, mode)


def _minibatch_size(draw: Draw, planned: list[Any]) -> int:
    size = draw.choice("minibatch_size", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
    while sum(-(-len(update.samples) // size) for update in planned) > MOST_MICROBATCHES:
        size += 2
    return size


def _segments(draw: Draw, updates: int, fixed_shape: bool, minibatch_size: int, compared: bool) -> tuple[Segment, ...]:
    rng = draw.rng("segments")
    stops = sorted(rng.randint(0, updates) for _ in range(rng.choice([1, 1, 2]))) if draw.feature("resume") else []
    worlds = [1, 1, 2, 3, 5] if draw.feature("worlds") else [1]
    loaders = ["loader", "stateful"] if draw.feature("loaders") else ["sampler"]
    loaders += ["ahead"] if draw.feature("read_ahead") else []
    other_size = draw.feature("other_microbatch", bool(stops) and not compared)
    other_cut = draw.feature("other_cut", bool(stops))
    segments = []
    for number, end in enumerate([*stops, updates]):
        world = rng.choice(worlds)
        later = number > 0
        segments.append(
            Segment(
                end=end,
                world=world,
                minibatch_size=minibatch_size + (rng.randint(0, 5) if later and other_size else 0),
                fixed_shape=fixed_shape != (later and other_cut and rng.random() < 0.5),
                loader=rng.choice(loaders),
                saved_by=rng.randint(0, 2),
                through_file=rng.random() < 0.1,
            )
        )
    if draw.feature("workers", segments[0].world == 1):
        segments[0] = replace(segments[0], loader="workers")
    return tuple(segments)


def _rules(draw: Draw, optimizer: str, groups: int, *, noise: bool, betas: bool) -> tuple[RuleCase, ...]:
    names = list(RULES)
    if optimizer == "SGD":
        names += ["linear-momentum"]
    if betas and optimizer in ("Adam", "AdamW", "RMSprop"):
        names += ["sqrt-sde", "root-half-life"]
    if draw.feature("squares", betas and optimizer in ("Adam", "AdamW")):
        names += [SQUARES_RULE] * len(names)
    if draw.feature("noise_rules", noise):
        names = list(NOISE_RULES)
    timescale = draw.feature("timescale")
    rng = draw.rng("rules")
    number = groups if rng.random() < 0.4 else 1
    return tuple(
        RuleCase(name, rng.random() < 0.5 and name != "legw" and not timescale, rng.choice([0.0, 3.5, 6.0]), timescale)
        for name in rng.choices(names, k=number)
    )


def _hyperparameters(draw: Draw, optimizer: str, group: int, most: float) -> dict[str, Any]:
    """The reference values of a parameter group; `most` is the largest k."""

    def number(name: str, low: float, high: float) -> float:
        return draw.number(f"{name} of group {group}", low, high)

    decay = draw.choice(f"decays in group {group}", [True, False])
    values: dict[str, Any] = {"lr": number("lr", 0.005, 0.03), "weight_decay": number("decay", 0, 0.1) if decay else 0}
    lowest = max(0.5, 1 - 0.9 / most)  # so that sqrt-sde leaves every beta in [0, 1)
    if optimizer == "SGD":
        momentum = draw.choice(f"momentum of group {group}", [0.0, 0.5, 0.9])
        values |= {"momentum": momentum, "nesterov": momentum > 0 and draw.choice(f"nesterov {group}", [True, False])}
    elif optimizer == "Adagrad":
        values |= {"eps": 0.01, "lr_decay": draw.choice(f"lr_decay of group {group}", [0.0, 0.1])}
    elif optimizer == "RMSprop":
        values |= {"alpha": number("alpha", lowest, 0.999), "eps": 0.01}
        values |= {"momentum": draw.choice(f"momentum of group {group}", [0.0, 0.5])}
    else:
        values |= {"betas": (number("beta1", lowest, 0.999), number("beta2", lowest, 0.999)), "eps": 0.01}
    return values


def _events(draw: Draw, case: Case) -> tuple[Event, ...]:
    rng = draw.rng("events")
    last = len(case.updates) - 1
    events: list[Event] = []

    def at() -> int:
        return rng.randint(0, last)

    if draw.feature("stray_backward"):
        events += [Event("stray_backward", at()) for _ in range(rng.randint(1, 3))]
    if draw.feature("stray_inside"):
        events += [Event("stray_backward", at(), rng.randint(1, 3), detail="inside")]
    if draw.feature("discard"):
        events += [Event("discard", at(), rng.randint(0, 3)) for _ in range(rng.randint(1, 2))]
    if draw.feature("set_epoch"):
        events += [Event("set_epoch", at(), rng.randint(0, 3))]
    if draw.feature("save_inside"):
        events += [Event("save_inside", at(), rng.randint(1, 3))]
    later = [update for update in range(last + 1) if case.updates[update].epoch > 0]
    if draw.feature("finished_epoch", bool(later)):
        events += [Event("finished_epoch", rng.choice(later), detail=rng.choice(["optimizer", "sampler"]))]
    if draw.feature("rollback"):
        update = at()
        events += [Event("rollback", update, rng.randint(0, 2), target=rng.randint(0, update))]
    if draw.feature("faults"):
        detail = f"{rng.choice(['rule', 'pre_hook', 'post_hook'])} {rng.choice(['discard', 'load'])}"
        events += [Event("fault", at(), 99, detail=detail)]
    update, early = at(), rng.randint(0, min(1, last))
    if draw.feature("misuse"):
        detail = rng.choice(["cleared", "no_backward"])
        events += [Event("misuse", update, int(detail == "cleared"), detail=detail)]
    if draw.feature("wrong_loop"):
        kinds = ["twice", "left", *(["skipped"] if case.by_update else [])]
        events += [Event(rng.choice(kinds), at(), rng.randint(0, 3))]
    alone = all(segment.world == 1 for segment in case.segments)
    if draw.feature("interrupt", alone and case.poisoned is None and not case.closure):
        events += [Event("interrupt", at(), rng.randint(0, 3), detail=str(rng.random()))]
    if case.saves is not None:
        events += [Event("restore", at(), rng.randint(0, 2), detail=rng.choice(["newest", "best"]))]
    if draw.feature("in_place"):
        detail = rng.choice(["zeroed", "multiplied"])
        events += [Event("misuse", early, int(detail == "zeroed"), detail=detail)]
    return tuple(events)
