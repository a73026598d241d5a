"""The routed decoder: choose an arm, catch it up, draft, verify, commit; until the answer ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from whiflash_infer.chat import ChatOptions
from whiflash_infer.drafters.base import Arm
from whiflash_infer.drafters.load import ArmSettings
from whiflash_infer.errors import UserError
from whiflash_infer.loop import DecodeLoop
from whiflash_infer.options import GenerationOptions
from whiflash_infer.pretrained import load_parts
from whiflash_infer.requests import Request, check_request, make_request
from whiflash_infer.routing.policies import Policy
from whiflash_infer.settings import EngineSettings
from whiflash_infer.target import Target
from whiflash_infer.types import PLAIN, Generation, Piece, Round

_DEFAULTS = EngineSettings()


class RoutedDecoder:
    """Answers prompts; the output is the target's own, whatever the policy does.

    arms: the drafting arms by name; the arm `plain`, which drafts nothing, is always there. Storage
    is kept from call to call, so one decoder answers one call at a time.
    """

    def __init__(
        self,
        target: Target,
        arms: Mapping[str, Arm],
        policy: Policy,
        settings: EngineSettings = _DEFAULTS,
    ) -> None:
        self.target = target
        self.arms = dict(arms)
        self.settings = settings
        self._loop = DecodeLoop(target, arms, policy, settings)

    @classmethod
    def from_pretrained(
        cls,
        target: Target | str | Path,
        *,
        ar: str | Path | None = None,
        diffusion: str | Path | None = None,
        router: str | Path | None = None,
        policy: Policy | str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        arms: ArmSettings | None = None,
        settings: EngineSettings = _DEFAULTS,
        allow_foreign_costs: bool = False,
        chat_options: ChatOptions | None = None,
        trust_remote_code: bool = False,
    ) -> RoutedDecoder:
        """From a Hugging Face id or folder, and the folders of drafters and router.

        `load_parts` says what is chosen where nothing is given, and what it raises.
        """
        parts = load_parts(
            target,
            ar=ar,
            diffusion=diffusion,
            router=router,
            policy=policy,
            dtype=dtype,
            device=device,
            arms=arms,
            allow_foreign_costs=allow_foreign_costs,
            chat_options=chat_options,
            trust_remote_code=trust_remote_code,
        )
        return cls(*parts, settings)

    @property
    def policy(self) -> Policy:
        return self._loop.steering.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._loop.steering.policy = policy

    def answer(self, prompt_ids: list[int], options: GenerationOptions) -> Generation:
        """Answer one prompt.

        Raises: UserError for an empty prompt, or one that leaves no room in the target's context.
        """
        return self.generate([prompt_ids], options)[0]

    def generate(
        self,
        prompts: Sequence[list[int]],
        options: GenerationOptions | Sequence[GenerationOptions],
        *,
        max_rows: int = 8,
    ) -> list[Generation]:
        """Answer prompts, up to `max_rows` of them at a time, in the order given.

        options: the same for all, or one for each. Raises: as `answer`, before anything is decoded.
        """
        answers: dict[int, Generation] = {}
        for piece in self.stream_all(prompts, options, max_rows=max_rows):
            if piece.generation is not None:
                answers[piece.index] = piece.generation
        return [answers[index] for index in range(len(prompts))]

    def stream(self, prompt_ids: list[int], options: GenerationOptions) -> Iterator[Piece]:
        """Answer one prompt, a piece a round."""
        return self.stream_all([prompt_ids], options, max_rows=1)

    def stream_all(
        self,
        prompts: Sequence[list[int]],
        options: GenerationOptions | Sequence[GenerationOptions],
        *,
        max_rows: int = 8,
    ) -> Iterator[Piece]:
        """Answer prompts together; each piece says whose it is, and the last brings the answer."""
        requests = self._requests(prompts, options)
        if max_rows < 1:
            raise UserError(f"max_rows is {max_rows}: it must be 1 or more")
        pieces = self._loop.run(requests, num_rows=min(max_rows, len(requests)))
        return _in_inference_mode(pieces)

    def _requests(
        self,
        prompts: Sequence[list[int]],
        options: GenerationOptions | Sequence[GenerationOptions],
    ) -> deque[Request]:
        if isinstance(options, GenerationOptions):
            options = [options] * len(prompts)
        if len(options) != len(prompts):
            raise UserError(f"{len(prompts)} prompts, but options for {len(options)}")
        for index, (prompt, wanted) in enumerate(zip(prompts, options, strict=True)):
            try:
                check_request(prompt, wanted, self.target.max_length)
                self.check_arm(wanted)
            except UserError as error:
                where = f"prompt {index}: " if len(prompts) > 1 else ""
                raise UserError(f"{where}{error}") from None
        return deque(
            make_request(
                index,
                prompt,
                wanted,
                stop_ids=self.target.stop_ids,
                tokenizer=self.target.tokenizer,
            )
            for index, (prompt, wanted) in enumerate(zip(prompts, options, strict=True))
        )

    def check_arm(self, options: GenerationOptions) -> None:
        """Raises: UserError for an arm that is not loaded."""
        if options.arm not in (None, PLAIN, *self.arms):
            known = ", ".join((PLAIN, *self.arms))
            raise UserError(f"arm is {options.arm!r}: choose from {known}")


def _in_inference_mode(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """But not the caller, while it has a piece."""
    while True:
        with torch.inference_mode():
            piece = next(pieces, None)
        if piece is None:
            return
        yield piece


def decode_rounds(result: Generation) -> Iterator[tuple[Round, Int[Tensor, " N"]]]:
    """Each round with the output tokens it committed."""
    start = len(result.output_ids) - result.decoded_tokens
    for done in result.rounds:
        yield done, result.output_ids[start : start + done.committed]
        start += done.committed
