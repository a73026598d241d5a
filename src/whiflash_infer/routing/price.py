"""What a token is worth: the price at which a policy achieves that very throughput."""

from __future__ import annotations

from collections.abc import Callable


def solve_price(
    run: Callable[[float], float], *, tolerance: float = 1e-4, max_iterations: int = 20
) -> list[tuple[float, float]]:
    """Dinkelbach iteration (1967). run(lam): the tokens a second that are achieved at that price.

    Long-run throughput E[tokens] / E[seconds] is greatest for the policy that maximises
    E[tokens] - lam * E[seconds] with lam that throughput itself; taking the throughput of each step
    as the price of the next climbs to it. Predictions are not exact, so a step may fall back: the
    best price seen is the answer. Returns the trace of (lam, tokens/s), the answer last.
    """
    lam, trace = 0.0, []
    for _ in range(max_iterations):
        achieved = run(lam)
        trace.append((lam, achieved))
        if any(abs(achieved - tried) <= tolerance * achieved for tried, _ in trace):
            break  # it has settled, or goes round in circles
        lam = achieved
    best = max(reversed(trace), key=lambda step: step[1])
    return trace if trace[-1][1] == best[1] else [*trace, best]
