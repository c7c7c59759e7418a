"""The loss of columns that several ranks have: it is computed once, and each goes backwards from it.

Ranks that share a row (by its tokens or by the model's matrices) all end with the columns of its units. A
loss may be a user's, and count or print: so the one that owns the columns alone computes it, and gives the
others the gradient with respect to the columns, a number for each. From there on every rank's autograd does
its part.
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
    """Return a scalar whose gradient through this rank's `columns` (f32 [S] each, equal on all ranks of
    `group`) is the gradient of `loss_of(columns)`. Only the rank with the number `owner` calls `loss_of`.
    Without a group this rank is alone and the owner."""
    names = list(columns)
    if group is None:
        return loss_of(columns)
    gradients = torch.zeros(len(names), *columns[names[0]].shape, device=columns[names[0]].device)
    if dist.get_rank() == owner:
        leaves = {name: columns[name].detach().requires_grad_() for name in names}
        with torch.enable_grad():
            # Copies: a loss may change what it is given.
            loss = loss_of({name: leaf.clone() for name, leaf in leaves.items()})
        if loss.requires_grad:
            found = torch.autograd.grad(loss, [leaves[name] for name in names], allow_unused=True)
            for row, gradient in zip(gradients, found, strict=True):
                if gradient is not None:
                    row.copy_(gradient)
    dist.broadcast(gradients, owner, group=group)
    return sum((columns[name] * row).sum() for name, row in zip(names, gradients, strict=True))
