"""One file an objective: `objective(output, labels) -> {"name": term}`, what a run minimises, seen from the model's whole output.

What else an objective may say or do, each only where it needs to:

- `views`: how many looks at each picture it wants; those after the first are in `output.views`.
- `reads`: which of "tokens" and "images" it uses; over several devices only these are gathered beside the embeddings.
- `meet(model)`: called once, before anything moves to the device: to copy the network, to stand at its stages, to know its head.
- `begin()`: called before each step's forward pass, outside the compiler.
- `stepped()`: called after each step of the optimiser, outside the compiler and without gradient.
- `optimizers`: optimisers of its own by name, which it steps itself; a module inside that says `own_step = True` is in none but those.
- a module inside that says `lr` learns at that rate; one that says `group` adds these options to its group of the run's optimiser.

Its state is in `state_dict()` and `optimizers`, so that an interrupted run goes on as if nothing had happened.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Output:
    """What a model makes of a batch, in float32.

    Args:
        embeddings: (B, D) raw, not normalised.
        tokens: (B, 1 + N, C) the backbone's summary of each picture first, then the positions of its last stage.
        images: (B, 3, H, W) as the backbone saw them.
        branches: what the head gives, (B, D_i) each: the embeddings alone, or the parts they are joined from.
        views: further looks at the same pictures, (B, 3, H, W) each.
    """

    embeddings: Float[Tensor, "B D"]
    tokens: Float[Tensor, "B N C"]
    images: Float[Tensor, "B 3 H W"]
    branches: tuple[Tensor, ...] = ()
    views: tuple[Tensor, ...] = ()

    @property
    def features(self) -> Float[Tensor, "B C"]:
        """The summary of each picture."""
        return self.tokens[:, 0]
