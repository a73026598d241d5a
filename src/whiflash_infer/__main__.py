"""Answer prompts: `python -m whiflash_infer TARGET ...`; `--help` says how."""

from __future__ import annotations

import io
import sys

from whiflash_infer.command.main import main

if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # answers hold any character, whatever the locale
    sys.exit(main())
