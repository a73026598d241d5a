"""What an evaluation runs: the policies, and what is varied beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from whiflash_infer.benchmark import Condition, Hindsight
from whiflash_infer.drafters.base import Arm
from whiflash_infer.errors import UserError
from whiflash_infer.hindsight import HINDSIGHT, priced_arms
from whiflash_infer.routing.oracles import best_oracle_round, hedge_of, oracle_path, plans_of
from whiflash_infer.routing.policies import PlannedPolicy, Policy, ShortenedPolicy, StaticPolicy
from whiflash_infer.routing.replay import stack_texts
from whiflash_infer.routing.rounds import ConversationRounds
from whiflash_infer.routing.router import POLICIES, ROUTED, Router, statics
from whiflash_infer.settings import EngineSettings, Sync
from whiflash_infer.types import AR, DIFFUSION, DRAFTERS, PLAIN
from whiflash_train.checks import checked


@checked
@dataclass(frozen=True, kw_only=True)
class Ablation:
    """What to run every policy with, one thing at a time, beside the configured settings.

    sync: how drafters follow. draft_length: most drafts of the AR arms, and block_size: slots of
    the diffusion arms, the anchor included, of the drafters as they are trained. batch: prompts
    that are decoded together; speed-ups are then against plain decoding in that batch.
    """

    sync: list[Sync]
    draft_length: list[int]
    block_size: list[int]
    batch: list[int]

    def __post_init__(self) -> None:
        for name, least in (("draft_length", 1), ("block_size", 2), ("batch", 1)):
            for value in getattr(self, name):
                if value < least:
                    raise UserError(f"evaluate.ablate.{name} holds {value}: at least {least}")


@dataclass(frozen=True, slots=True)
class Variation:
    """A condition that differs from a policy's own in one thing."""

    condition: Condition
    policy: str
    varied: str
    value: str | int


def policy_names(
    wanted: Sequence[str] | str | None, router: Router, arms: Mapping[str, Arm]
) -> list[str]:
    """Names of the conditions; a policy that is named again gets a number, as `hazard#2`.

    wanted: None: every arm alone, entropy and hazard. "all": with every policy that these arms
    allow. Raises: UserError for another word.
    """
    if wanted is None:
        return [*statics((PLAIN, *arms)), "entropy", "hazard"]
    if wanted == "all":
        routed = [name for name in ROUTED if router.has_arms_of(name)]
        return [*statics((PLAIN, *arms)), *routed, *HINDSIGHT]
    if isinstance(wanted, str):
        raise UserError(f"evaluate.policies is {wanted!r}: null, all, or a list of policies")
    seen: Counter[str] = Counter()
    names = []
    for name in wanted:
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names


def chosen_conditions(
    router: Router,
    names: Sequence[str],
    arms: Mapping[str, Arm],
    settings: EngineSettings,
    *,
    seed: int,
    temperature: float,
) -> list[Condition]:
    """Raises: UserError for a policy that does not exist, whose arm is left out, or that has to
    know the answer where answers are drawn."""
    if PLAIN not in names:
        raise UserError("evaluate.policies must hold `plain`: every speed-up is against it")
    knowing = [name for name in names if name.partition("#")[0] in HINDSIGHT]
    if knowing and temperature > 0:
        raise UserError(
            f"evaluate.policies: {knowing[0]} has to know the answer, and answers are drawn: set "
            "evaluate.temperature=0"
        )
    return [
        Condition(
            name=name,
            policy=_policy(name.partition("#")[0], router, arms, seed),
            settings=settings,
        )
        for name in names
    ]


def chosen_policies(
    router: Router, names: Sequence[str], arms: Mapping[str, Arm], seed: int
) -> list[Policy]:
    """Those that need not know the answer, each once. Raises: as `chosen_conditions`."""
    once = dict.fromkeys(name.partition("#")[0] for name in names)
    policies = [router.policy(name, seed=seed) for name in once if name not in HINDSIGHT]
    for policy in policies:
        _require_arms(policy, arms)
    return policies


def variations(
    ablation: Ablation, conditions: Sequence[Condition], settings: EngineSettings
) -> list[Variation]:
    """Of all these conditions, what differs from how they are already."""
    found = []
    for condition in conditions:
        found += [v for v in _engine_variations(ablation, condition) if _is_other(v, settings)]
        found += _length_variations(ablation, condition)
    return found


def hindsight(name: str, router: Router, arms: Mapping[str, Arm]) -> Hindsight:
    """What makes the policy of this name, once the answers are labelled."""
    priced, costs = priced_arms(arms, router.costs), router.costs

    def make(labels: Sequence[ConversationRounds]) -> Policy:
        if not sum(map(len, labels)):  # answers of one token, which no round has to bring
            return StaticPolicy(PLAIN)
        texts, together = stack_texts(labels, priced), len(labels)
        if name == "hedge":
            return hedge_of(texts, costs, router.settings.hazard.lam)
        oracle = {"oracle_round": best_oracle_round, "oracle_path": oracle_path}[name]
        return PlannedPolicy(
            name, priced, plans_of(texts, oracle(texts, costs, num_texts=together)[0])
        )

    return make


def _policy(name: str, router: Router, arms: Mapping[str, Arm], seed: int) -> Policy | Hindsight:
    if name in HINDSIGHT:
        return hindsight(name, router, arms)
    if name not in POLICIES:
        known = ", ".join((*POLICIES, *HINDSIGHT))
        raise UserError(f"unknown policy {name!r}: choose from {known}")
    policy = router.policy(name, seed=seed)
    _require_arms(policy, arms)
    return policy


def _require_arms(policy: Policy, arms: Mapping[str, Arm]) -> None:
    for arm in {*policy.arms} - {PLAIN, *arms}:
        raise UserError(f"policy {policy.name}: arms.{arm} is null, so there is no arm")


def _engine_variations(ablation: Ablation, condition: Condition) -> Iterator[Variation]:
    name, settings = condition.name, condition.settings
    for sync in ablation.sync if name != PLAIN else []:
        other = replace(settings, sync=sync)
        yield _varied(condition, "sync", sync, settings=other)
    for batch in ablation.batch:
        yield _varied(
            condition, "batch", batch, batch=batch, baseline=_label(PLAIN, "batch", batch)
        )


def _is_other(variation: Variation, settings: EngineSettings) -> bool:
    return variation.value != {"sync": settings.sync, "batch": 1}[variation.varied]


def _length_variations(ablation: Ablation, condition: Condition) -> Iterator[Variation]:
    """Of policies that draft so; those that know the answer would have to plan anew."""
    policy = condition.policy
    if not isinstance(policy, Policy):
        return
    lengths = [("draft_length", AR, n, n) for n in ablation.draft_length]
    lengths += [("block_size", DIFFUSION, n, n - 1) for n in ablation.block_size]
    for varied, drafter, value, drafts in lengths:
        longest = {arm: drafts for arm in policy.arms if DRAFTERS.get(arm) == drafter}
        if longest:
            label = _label(condition.name, varied, value)
            yield _varied(condition, varied, value, policy=ShortenedPolicy(policy, longest, label))


def _varied(condition: Condition, varied: str, value: str | int, **changes: object) -> Variation:
    name = _label(condition.name, varied, value)
    return Variation(replace(condition, name=name, **changes), condition.name, varied, value)


def _label(policy: str, varied: str, value: str | int) -> str:
    return f"{policy}, {varied} {value}"
