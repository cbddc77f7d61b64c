"""Open a run: folder, storage, cluster, device, rows, model, weights, embeddings, display."""
