"""One file a loss: `loss(embeddings (B, D), labels (B,), memory=None) -> scalar`."""
