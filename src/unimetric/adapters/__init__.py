"""One file an adapter: `adapter(backbone) -> backbone`, frozen but for what it inserts."""
