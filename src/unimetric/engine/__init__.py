"""The moving parts: pictures to tensors, the model, the training loop, evaluation, checkpoints."""
