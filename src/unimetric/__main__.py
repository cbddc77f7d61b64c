"""Entry point of `python -m unimetric`."""

from __future__ import annotations

from unimetric.cli import main

if __name__ == "__main__":
    main()
