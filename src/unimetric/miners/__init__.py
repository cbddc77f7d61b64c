"""One file a miner: `miner(similarity (B, R), pairs) -> Pairs | Triplets`, without gradient. What it `gives` is an attribute."""
