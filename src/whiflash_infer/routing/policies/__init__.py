"""The routing policies, all behind `whiflash_infer.routing.protocol.Policy`."""

from whiflash_infer.routing.policies.base import (
    BasePolicy,
    PlannedPolicy,
    RandomPolicy,
    ShortenedPolicy,
    StaticPolicy,
    TextPlan,
)
from whiflash_infer.routing.policies.hazard import HazardPolicy, HazardSettings
from whiflash_infer.routing.policies.online import BanditPolicy, HedgePolicy
from whiflash_infer.routing.policies.rules import (
    CategoryPolicy,
    DeltaPolicy,
    EntropyPolicy,
    RequestPolicy,
)
from whiflash_infer.routing.protocol import Policy

__all__ = [
    "BanditPolicy",
    "BasePolicy",
    "CategoryPolicy",
    "DeltaPolicy",
    "EntropyPolicy",
    "HazardPolicy",
    "HazardSettings",
    "HedgePolicy",
    "PlannedPolicy",
    "Policy",
    "RandomPolicy",
    "RequestPolicy",
    "ShortenedPolicy",
    "StaticPolicy",
    "TextPlan",
]
