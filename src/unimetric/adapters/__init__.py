"""One file per adapter: `adapter(backbone) -> backbone`. Only the inserted parameters are trainable."""
