"""One file per miner: `miner(similarity (B, R), pairs) -> Pairs | Triplets`, without gradient.

The attribute `gives` is the type that the miner returns.
"""
