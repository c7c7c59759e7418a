"""Loss of columns that several ranks have: one rank computes it, and each rank runs its own backward pass.

Ranks that share a row, by its tokens or by the model's matrices, all have the columns of its units. A user's
loss may have side effects, so only the owner of the columns computes it. The owner then sends the gradient
with respect to the columns to the others. From there, autograd on each rank does the rest.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from trainer_service.backends.base import Columns


def shared_loss(
    columns: Columns,
    loss_of: Callable[[Columns], Tensor],
    *,
    group: dist.ProcessGroup | None,
    owner: int,
) -> Tensor:
    """Return a scalar whose gradient through this rank's `columns` is the gradient of `loss_of(columns)`.

    The columns are f32 [S] each and equal on all ranks of `group`. Only the rank with the global number
    `owner` calls `loss_of`. Without a group, this rank is the owner."""
    names = list(columns)
    if group is None:
        return loss_of(columns)
    gradients = torch.zeros(len(names), *columns[names[0]].shape, device=columns[names[0]].device)
    if dist.get_rank() == owner:
        leaves = {name: columns[name].detach().requires_grad_() for name in names}
        with torch.enable_grad():
            # Pass copies, because a loss may change its inputs in place.
            loss = loss_of({name: leaf.clone() for name, leaf in leaves.items()})
        if loss.requires_grad:
            found = torch.autograd.grad(loss, [leaves[name] for name in names], allow_unused=True)
            for row, gradient in zip(gradients, found, strict=True):
                if gradient is not None:
                    row.copy_(gradient)
    dist.broadcast(gradients, owner, group=group)
    return sum((columns[name] * row).sum() for name, row in zip(names, gradients, strict=True))
