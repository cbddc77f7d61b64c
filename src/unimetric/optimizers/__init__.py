"""One file an optimiser: `optimizer(groups, *, lr, ...) -> torch.optim.Optimizer`."""
