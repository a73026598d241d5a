"""Drafters served by other engines.

`python -m whiflash_infer.serving {vllm,sglang} <target> <drafter>` checks that an engine's loader
will read a drafter's folder as it was meant, and prints the command that serves it.
"""

from whiflash_infer.serving.commands import Launch, launch
from whiflash_infer.serving.contracts import CONTRACTS, ENGINES, Contract

__all__ = ["CONTRACTS", "ENGINES", "Contract", "Launch", "launch"]
