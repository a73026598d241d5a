"""Train a drafter or the router: `python train.py task=ar_drafter`."""

from pathlib import Path

from omegaconf import DictConfig

from whiflash_train import runner
from whiflash_train.entry import entry_point
from whiflash_train.sweeps import monitored


@entry_point("train", root=Path(__file__).parent, sweep_goes_on=True)
def main(cfg: DictConfig) -> float:
    """What the run reached, for a sweeper that looks for the best."""
    return monitored(cfg, runner.fit(cfg))


if __name__ == "__main__":
    main()
