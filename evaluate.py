"""Measure a router: `python evaluate.py checkpoint=artifacts/smollm2_135m/router`."""

from pathlib import Path

from omegaconf import DictConfig

from whiflash_infer.errors import UserError
from whiflash_train import evaluation, lossless_check, replay_check
from whiflash_train.entry import entry_point

ROOT = Path(__file__).parent
CHECKS = {
    None: evaluation.evaluate,
    "lossless": lossless_check.check_lossless,
    "replay": replay_check.check_replay,
}


@entry_point("evaluate", root=ROOT)
def main(cfg: DictConfig) -> None:
    if cfg.check not in CHECKS:
        raise UserError(f"check is {cfg.check!r}: it must be null, lossless or replay")
    CHECKS[cfg.check](cfg)


if __name__ == "__main__":
    main()
