"""The third trainee: the router, from dense rounds and a cost profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress

from whiflash_infer.artifacts import require_match
from whiflash_infer.errors import UserError
from whiflash_infer.nets.router import RouterConfig, RouterNet
from whiflash_infer.routing.costs import CostModel
from whiflash_infer.routing.features import NUM_SCALARS, SCALARS
from whiflash_infer.routing.policies import HazardSettings
from whiflash_infer.routing.replay import DenseTexts, Replayed, stack_texts
from whiflash_infer.routing.rounds import ConversationRounds, load_rounds
from whiflash_infer.routing.router import Router, save_router
from whiflash_infer.types import PLAIN
from whiflash_train.checks import checked
from whiflash_train.objectives.router import RouterLoss, router_objective
from whiflash_train.replay_validation import ReplayValidation
from whiflash_train.router_data import RouterBatches, router_batch
from whiflash_train.router_fit import (
    FitRecipe,
    best_arm_by_category,
    fit_frailty,
    hazards_of_strangers,
    predictable_ceiling,
    solve_paces,
    static_replays,
)
from whiflash_train.tasks import FitSettings, Trainee, Workspace, lineage
from whiflash_train.verdict import show, show_calibration

ROUNDS_MADE_BY = "python data_prep/log_rounds.py"
HIDDEN = "hidden"


@checked
@dataclass(frozen=True, kw_only=True)
class RouterTask:
    """lam: the price in tokens a second, or `auto` for the one that maximises throughput.

    arms: drafting arms to choose among; None: all that the rounds label. features: that the
    networks see, names of `SCALARS` and `hidden`. loss: of the hazards. switch_margin to drift: see
    `HazardSettings`; frailty `auto` is fitted. train_on: categories of training conversations,
    all when None; leave_out: categories to leave out of them. Validation is always on all.
    ceiling_folds: parts of the cross-fitted ceiling; 0 goes without it.
    """

    fit: FitSettings
    lam: float | int | Literal["auto"]
    width: int
    dropout: float | int
    arms: list[str] | None
    features: list[str]
    loss: RouterLoss
    adaptive_length: bool
    switch_margin: float | int | None
    dwell: int | None
    latch: int | None
    frailty: float | int | Literal["auto"] | None
    online_price: float | int | None
    drift: float | int | None
    train_on: list[str] | None
    leave_out: list[str]
    ceiling_folds: int

    def __post_init__(self) -> None:
        at_least = {"lam": 0, "switch_margin": 0, "dwell": 1, "latch": 1, "width": 1}
        for name, least in at_least.items():
            value = getattr(self, name)
            if isinstance(value, int | float) and value < least:
                raise ValueError(f"{name} is {value}: it must be {least} or more")
        for name in ("frailty", "online_price", "drift"):
            value = getattr(self, name)
            if isinstance(value, int | float) and value <= 0:
                raise ValueError(f"{name} is {value}: it must be null or above 0")
        unknown = [name for name in self.features if name not in (*SCALARS, HIDDEN)]
        if unknown or not self.features:
            raise ValueError(f"features is {self.features}: choose from {SCALARS} and {HIDDEN!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}: it must lie from 0 up to 1")
        if self.ceiling_folds < 0 or self.ceiling_folds == 1:
            raise ValueError(f"ceiling_folds is {self.ceiling_folds}: it must be 0, or 2 or more")

    def build(self, workspace: Workspace) -> Trainee:
        path = workspace.paths["rounds"]
        splits, manifest = load_rounds(path, made_by=ROUNDS_MADE_BY)
        for split in ("router", "validation"):
            if split not in splits:
                raise UserError(f"{path} holds no rounds of split {split!r}")
        target = workspace.load_target()
        required = target.identity().required()
        require_match(path, manifest["target"], required, made_by=ROUNDS_MADE_BY)
        costs = workspace.load_costs(target)
        arms = self._arms(manifest["max_draft"])
        max_draft = {arm: manifest["max_draft"][arm] for arm in arms[1:]}
        _require_priced(workspace.paths["costs"], costs, max_draft)
        train = stack_texts(self._chosen(splits["router"]), arms)
        validation = stack_texts(splits["validation"], arms)
        config = self._config(train.features.shape[1], max_draft)
        net = RouterNet(config)
        net.set_normaliser(train.features, self._unused(train.features.shape[1]))
        statics = static_replays(train, costs)
        settings = self._settings(config, train, validation, costs, workspace.seed)
        solve_paces(net, train, list(statics.values()))
        judge = ReplayValidation(
            texts=validation,
            costs=costs,
            settings=settings,
            lam=None if self.lam == "auto" else float(self.lam),
            category_arms=best_arm_by_category(statics, train),
            ceiling=self._ceiling(config, train, validation, costs, settings, workspace.seed),
        )
        made_from = {
            "drafters": manifest["drafters"],
            "arm_settings": manifest["arm_settings"],
            "arms": {
                arm: {name: manifest[name][arm] for name in ("max_draft", "max_nodes")}
                for arm in max_draft
            },
        }
        return self._trainee(workspace, net, train, judge, manifest["target"], made_from)

    def _trainee(
        self,
        workspace: Workspace,
        net: RouterNet,
        train: DenseTexts,
        judge: ReplayValidation,
        target: Mapping[str, Any],
        made_from: Mapping[str, Any],
    ) -> Trainee:
        console = Console()

        def export(path: Path, metrics: Mapping[str, float]) -> None:
            settings, outcome = judge.finish(net)
            router = Router(net=net, settings=settings, costs=judge.costs, manifest={})
            verdict, replayed = judge.judge(router, outcome)
            manifest = {**lineage(workspace, target), **made_from, "replay": replayed}
            save_router(path, net, settings, judge.costs, {**manifest, "metrics": dict(metrics)})
            show(console, verdict)
            show_calibration(console, replayed["calibration"])
            steps = " -> ".join(f"{lam:.2f}" for lam, _ in outcome.trace)
            console.print(f"price lam: {steps} tokens a second")

        return Trainee(
            net=net,
            objective=partial(router_objective, loss=self.loss),
            train_batches=lambda start, share: RouterBatches(
                router_batch(train),
                batch_size=self.fit.batch_size,
                seed=workspace.seed,
                start_step=start,
                num_steps=self.fit.max_steps,
                share=share,
            ),
            val_batches=lambda _share: [router_batch(judge.texts)],
            monitor="val/tokens_per_s",
            export=export,
            facts=_facts(train, judge.texts),
            preview=lambda told, _count: show(told, judge.before()),
            callbacks=[judge],
        )

    def _unused(self, num_features: int) -> list[int]:
        scalars = [i for i, name in enumerate(SCALARS) if name not in self.features]
        hidden = [] if HIDDEN in self.features else list(range(NUM_SCALARS, num_features))
        return scalars + hidden

    def _arms(self, labelled: Mapping[str, int]) -> tuple[str, ...]:
        wanted = list(labelled) if self.arms is None else [a for a in self.arms if a != PLAIN]
        unknown = [arm for arm in wanted if arm not in labelled]
        if unknown or not wanted:
            raise UserError(
                f"router.arms is {self.arms}: choose from {', '.join(labelled)}, which the rounds "
                "label (plain is always among them)"
            )
        return PLAIN, *(arm for arm in labelled if arm in wanted)

    def _chosen(self, conversations: Sequence[ConversationRounds]) -> list[ConversationRounds]:
        known = Counter(str(c.category) for c in conversations)
        for name in [*(self.train_on or []), *self.leave_out]:
            if name not in known:
                raise UserError(
                    f"router.train_on and router.leave_out know no category {name!r}: the rounds "
                    f"have {', '.join(sorted(known))}"
                )
        wanted = set(known if self.train_on is None else self.train_on) - set(self.leave_out)
        if not wanted:
            raise UserError("router.leave_out leaves no category to train on")
        return [c for c in conversations if str(c.category) in wanted]

    def _config(self, num_features: int, max_draft: dict[str, int]) -> RouterConfig:
        try:
            return RouterConfig(
                num_features=num_features,
                width=self.width,
                max_draft=max_draft,
                dropout=float(self.dropout),
            )
        except ValueError as error:
            raise UserError(f"router.width: {error}") from None

    def _settings(
        self,
        config: RouterConfig,
        train: DenseTexts,
        validation: DenseTexts,
        costs: CostModel,
        seed: int,
    ) -> HazardSettings:
        """All but the price. Fitted frailty is that of kinds of text that were not trained on."""
        frailty = self.frailty
        if frailty == "auto":
            with Console().status("fitting how texts differ"):
                hazards = hazards_of_strangers(
                    config, train, validation, self._recipe(config, seed)
                )
                frailty = fit_frailty(hazards, validation, costs)
        return HazardSettings(
            lam=0.0,
            adaptive_length=self.adaptive_length,
            switch_margin=_number(self.switch_margin),
            dwell=self.dwell,
            latch=self.latch,
            frailty=_number(frailty),
            online_price=_number(self.online_price),
            drift=_number(self.drift),
        )

    def _recipe(self, config: RouterConfig, seed: int) -> FitRecipe:
        return FitRecipe(
            num_steps=self.fit.max_steps,
            batch_size=self.fit.batch_size,
            learning_rate=self.fit.learning_rate,
            weight_decay=self.fit.weight_decay,
            seed=seed,
            unused=tuple(self._unused(config.num_features)),
        )

    def _ceiling(
        self,
        config: RouterConfig,
        train: DenseTexts,
        validation: DenseTexts,
        costs: CostModel,
        settings: HazardSettings,
        seed: int,
    ) -> Replayed | None:
        num_folds = min(self.ceiling_folds, len(validation))
        if num_folds < 2:
            return None
        with _progress("cross-fitting the predictable ceiling", num_folds) as advance:
            return predictable_ceiling(
                config,
                train,
                validation,
                costs,
                settings,
                self._recipe(config, seed),
                num_folds=num_folds,
                advance=advance,
            )


def _number(value: float | int | None) -> float | None:
    return None if value is None else float(value)


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar, and how to tell it that one more part is done."""
    with Progress(transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def _facts(train: DenseTexts, validation: DenseTexts) -> dict[str, str]:
    parts = [
        f"{len(part.positions):,} of {len(part)} conversations {what}"
        for part, what in ((train, "to train"), (validation, "to validate"))
    ]
    return {"rounds": ", ".join(parts), "arms": ", ".join(train.arms)}


def _require_priced(path: Path, costs: CostModel, max_draft: Mapping[str, int]) -> None:
    """The cost profile must price exactly the drafts that the rounds label."""
    require_match(
        path,
        {f"longest draft of {arm}": costs.max_draft.get(arm) for arm in max_draft},
        {f"longest draft of {arm}": length for arm, length in max_draft.items()},
        made_by="python data_prep/profile_costs.py",
    )
