"""Machine that a benchmark runs on: the processor, its instruction sets, and time stolen by the hypervisor."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from pathlib import Path

#: Instruction sets that decide how fast products are, as the kernels of Linux spell them for x86 and for ARM.
SETS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
)


def processor() -> str:
    """Return the name of the CPU and its instruction sets, as far as the system tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = facts.get("model name") or f"{platform.machine()} part {facts.get('CPU part', 'unknown')}"
    flags = facts.get("flags", facts.get("Features", "")).split()
    return f"{name}; {' '.join(each for each in SETS if each in flags) or 'no vector instructions listed'}"


def _ticks() -> tuple[int, int]:
    """Return the stolen and all ticks of all CPUs since the start of the system; zeros if it does not count them."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except OSError:
        return 0, 0
    return ticks[7], sum(ticks)


@dataclass
class Stolen:
    """Fraction of the time that the hypervisor gave to other machines since this object was made."""

    start: tuple[int, int] = field(default_factory=_ticks)

    def __str__(self) -> str:
        stolen, total = (now - before for now, before in zip(_ticks(), self.start, strict=True))
        return f"stolen by the hypervisor: {100 * stolen / total:.1f} % of the time" if total else "stolen time: not counted by this system"
