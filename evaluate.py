"""Measure a router: `python evaluate.py checkpoint=artifacts/smollm2_135m/router`."""

from pathlib import Path

from omegaconf import DictConfig

from whiflash_infer.errors import UserError
from whiflash_train.entry import entry_point
from whiflash_train.evaluation import lossless_check, measurement_check, replay_check, run

ROOT = Path(__file__).parent
CHECKS = {
    None: run.evaluate,
    "lossless": lossless_check.check_lossless,
    "replay": replay_check.check_replay,
    "aa": measurement_check.check_measurement,
}


@entry_point("evaluate", root=ROOT)
def main(cfg: DictConfig) -> None:
    if cfg.check not in CHECKS:
        raise UserError(f"check is {cfg.check!r}: it must be null, lossless, replay or aa")
    CHECKS[cfg.check](cfg)


if __name__ == "__main__":
    main()
