"""Train a drafter or the router: `python train.py task=ar_drafter`."""

from pathlib import Path

from omegaconf import DictConfig

from whiflash_train import runner
from whiflash_train.entry import entry_point


@entry_point("train", root=Path(__file__).parent)
def main(cfg: DictConfig) -> None:
    runner.fit(cfg)


if __name__ == "__main__":
    main()
