"""One file per miner: `miner(similarity (B, R), pairs) -> Pairs | Triplets`.

Miners compute no gradient. The attribute `gives` is the type that the miner returns. The interface is
`kinds.Miner`.
"""

from __future__ import annotations

from unimetric.spec import catalogue

catalogue(__name__)
