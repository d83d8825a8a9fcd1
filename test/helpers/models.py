"""Unusual models: parameters of every dtype and layout, and parameters that only some samples use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from helpers.reference import Array, filled, network


class Everything(nn.Module):
    """Parameters and buffers of every dtype and layout, with values that depend on the rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        value = torch.nan if rank == 1 else rank + 0.25
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            self.register_parameter(
                f"parameter_{dtype}".replace(".", "_"), nn.Parameter(torch.full((2, 3), value, dtype=dtype))
            )
        self.scalar = nn.Parameter(torch.tensor(value))
        self.transposed = nn.Parameter(torch.full((2, 3), value).T)
        self.empty = nn.Parameter(torch.empty(0))
        self.complex = nn.Parameter(torch.full((2,), complex(value, rank)))
        self.tied = self.scalar
        for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64):
            self.register_buffer(f"buffer_{dtype}".replace(".", "_"), torch.tensor([rank, 1 - rank % 2]).to(dtype))
        self.register_buffer("large", torch.tensor([2**60 + rank]))
        self.register_buffer("eighth", torch.tensor([rank + 0.25]).to(torch.float8_e4m3fn))
        self.register_buffer("infinite", torch.tensor([torch.inf, -torch.inf, -0.0]) * (1 - 2 * (rank % 2)))


def everything(module: nn.Module) -> dict[str, Tensor]:
    """Return all real parameters and buffers as float32, to be compared by name."""
    return {name: tensor.detach().float() for name, tensor in module.state_dict().items() if not tensor.is_complex()}


def shifted(rank: int) -> nn.Module:
    """Return a network of which one weight differs between ranks by a rounding error."""
    model = network()
    with torch.no_grad():
        next(model.parameters())[0, 0] += rank * 1e-15
    return model


class Experts(nn.Module):
    """The few samples with x[0] > 1 use an additional layer, and no sample uses a third one."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.rare, self.unused = (nn.Linear(3, 2).double() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.common(x)
        chosen = x[:, 0] > 1
        return y.index_add(0, chosen.nonzero()[:, 0], self.rare(x[chosen])) if chosen.any() else y


class Words(nn.Module):
    """An embedding, whose index is computed from the first number of a sample."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.vectors = nn.Embedding(10, 2, sparse=sparse).double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.vectors((4 * x[:, 0]).long() % 10)
        return y


class Gan:
    """A generator and a discriminator of 40 samples, through which the generator's loss goes; `wrap`: around each."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> None:
        models = [wrap(filled(nn.Linear(*sizes).double())) for sizes in ((2, 3), (3, 1))]
        self.generator, self.discriminator = models
        numbers = torch.linspace(-1, 1, 240, dtype=torch.float64)
        self.real, self.noise = numbers[:120].view(40, 3), numbers[-80:].view(40, 2)

    def loss_d(self, rows: list[int]) -> Tensor:
        with torch.no_grad():
            fake = self.generator(self.noise[rows])
        both = self.discriminator(torch.cat([self.real[rows], fake]))
        return (both[: len(rows)] - 1).square().mean() + both[len(rows) :].square().mean()  # type: ignore[no-any-return]

    def loss_g(self, rows: list[int]) -> Tensor:
        """Its backward also adds to the gradients of the discriminator."""
        judge: Any = getattr(self.discriminator, "module", self.discriminator)
        return (judge(self.generator(self.noise[rows])) - 1).square().mean()  # type: ignore[no-any-return]

    def weights(self) -> list[Array]:
        both = [*self.discriminator.parameters(), *self.generator.parameters()]
        return [parameter.detach().numpy() for parameter in both]


def half_frozen() -> Any:
    """Return a network whose first layer requires no gradient."""
    model: Any = network()
    model[0].requires_grad_(False)
    return model


class Mixed(nn.Module):
    """One layer of each dtype, whose outputs are summed."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 2).to(dtype) for dtype in dtypes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x.to(layer.weight.dtype)).double() for layer in self.layers]).sum(dim=0)
