"""What wraps the model, a DistributedDataParallel or FSDP2, sums the gradients in `backward()`, with a collective."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from variable_batch_size.backend.agreement import Agreement
from variable_batch_size.data.batches import Batch
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim.sums.base import Sum
from variable_batch_size.optim.sums.ranks import Ranks, absent_rank_error
from variable_batch_size.optim.tensors.arithmetic import collect_gradients, multiply
from variable_batch_size.optim.tensors.parameters import Parameters


class InBackward(Sum):
    """The base class of sums for models whose wrapper sums in `backward()`, so that each loss must carry its weight."""

    wrapper: str  # name of what wraps the model, for errors

    def __init__(self, ranks: Ranks, parameters: Parameters, agreement: Agreement, **options: Any) -> None:
        self._agreement = agreement  # passed in, because creating one waits for all ranks
        super().__init__(ranks, parameters, **options)

    @staticmethod
    def _check_members(parameters: Sequence[Tensor], members: Iterable[Tensor], message: str) -> None:
        """Raise ValueError if a parameter of the optimizer is not among `members`, which the model's wrapper sums.

        `message`: the message of the error, in which {} is replaced by the parameter in words.
        """
        summed = set(map(id, members))
        for number, parameter in enumerate(parameters):
            if id(parameter) not in summed:
                raise ValueError(message.format(f"parameter {number}, of shape {tuple(parameter.shape)},"))

    def _prepare_backward(self, microbatch: Microbatch, scaler: GradScaler | None, options: Mapping[str, Any]) -> None:
        """Raise RuntimeError if the graph of the gradients is asked for, which a sum over the ranks does not have."""
        if options.get("create_graph"):
            raise RuntimeError(
                "create_graph=True does not work with DDP or FSDP2, which sum gradients within backward(); omit it, or "
                "train the bare model, without model=, after vbs.broadcast_parameters(model)"
            )

    @contextmanager
    def _name_absent_ranks(self) -> Iterator[None]:
        """Turn an error after torch's timeout in a collective into one that says that a rank takes no part."""
        try:
            yield
        except RuntimeError as error:
            self._backend.while_waiting()  # raises if the absent rank has left a message that says why it is absent
            # Errors of torch's collectives contain the name of the library that communicates.
            if any(word in str(error) for word in ("gloo", "NCCL")):
                raise absent_rank_error(error) from error
            raise

    def _check_carried(self, fresh: Sequence[bool], *, needed: bool) -> float:
        """Return the factor that the loss of a microbatch has carried; check that no other backward came.

        Args:
            fresh: for each parameter, whether a backward has changed its gradient since the last microbatch.
            needed: whether at least one gradient must have changed.
        """
        if self._factor is None:
            raise RuntimeError(
                f"with {self.wrapper} each loss, also of a replay, needs its weight, but step() came without "
                "optimizer.backward(); call optimizer.backward(loss), not loss.backward(), with others= for several "
                "optimizers"
            )
        self._check.check(fresh, needed=needed)
        return self._factor

    def _scale_and_sum_message(self, batch: Batch, factor: float | None) -> tuple[list[Tensor], Sequence[Tensor]]:
        """Multiply the gradients by `factor`, sum the message over the ranks, and return both.

        The wrapper of the model has summed the gradients already. They are also divided by the scale of the losses.
        """
        gradients = collect_gradients(self.parameters)
        multiply(gradients, self._remaining_factor(factor), self._backend)
        message = self._collect_message(batch)
        if message:
            self._ranks.all_reduce(message)
        return gradients, message

    def _common_scale(self, scale: Tensor) -> Tensor:
        """Return the smallest scale of losses of all ranks, 0-D.

        Scaled gradients are added over ranks, whose scalers may differ: only that of a rank whose gradient overflows
        is sure to become smaller.
        """
        backend = self._backend.job
        if backend.world.size == 1:
            return scale
        scales = scale.new_zeros(backend.world.size)  # (ranks,), of which each fills in its own
        scales[backend.world.rank] = scale
        backend.all_reduce_sum([scales])
        return scales.min()

    def reset(self, timeout: float | None = None) -> None:
        """Let the step start over, on all ranks: one rank cannot take back what it has summed with others.

        `timeout`: seconds to wait for the other ranks; None if all of them load a state, which needs no waiting.
        """
        if timeout is not None:
            self._agreement.gather("discard_step()", "", timeout)
        self._ranks.interrupted = False
        self._expect_forward()

    @abstractmethod
    def _expect_forward(self) -> None:
        """Reset the wrapper, so that a forward pass can begin after an exception has interrupted another."""
