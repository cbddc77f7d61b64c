"""One file a head: `head(tokens (B, 1 + N, C)) -> raw embedding (B, D)`; it says its `dim`. The first token is the picture's summary."""
