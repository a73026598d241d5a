"""Drafters in and out of the layouts that other programs read; one module a layout.

`python -m whiflash_infer.exchange <source> <destination> --layout ...` converts between them.
"""

from whiflash_infer.exchange.facts import Given, TargetFacts
from whiflash_infer.exchange.formats import LAYOUTS, Imported, detect, read_drafter, write_drafter

__all__ = [
    "LAYOUTS",
    "Given",
    "Imported",
    "TargetFacts",
    "detect",
    "read_drafter",
    "write_drafter",
]
