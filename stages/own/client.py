"""What the user's rollout function talks to the policy with."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stages.own.messages import FromProcess, Generate, Generated


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy generated. `finish`: stop, or length, and then nothing more fits into the sequence."""

    tokens: list[int]
    finish: str


class Client:
    """One conversation. `ids`: all of its tokens so far, the prompt first."""

    def __init__(
        self, id: str, say: Callable[[FromProcess], None], prompt_ids: list[int], tokenizer: tuple[str, bool]
    ) -> None:
        self.id = id
        self.prompt_ids = prompt_ids
        self.ids = list(prompt_ids)
        self._say, self._tokenizer_of = say, tokenizer
        self._turn: asyncio.Future[Generated] | None = None

    @property
    def tokenizer(self) -> Any:
        """The policy's, as everything here renders with it: `encode(text)`, `decode(ids)`, `control_id(text)`."""
        from stages.text import load_tokenizer

        return load_tokenizer(*self._tokenizer_of)

    async def generate(self, ids: Sequence[int], stop_ids: Sequence[int] = ()) -> Turn:
        """The policy's next turn after `ids`, which are `client.ids` and what you put behind them: what a tool says is
        read by the policy, and not trained. `stop_ids` end a turn besides the tokenizer's own.

        A conversation that was broken off begins again from its start and is given the turns that it had, so what the
        function does may depend on nothing but its arguments and its turns.
        """
        if self._turn is not None:
            raise RuntimeError("a conversation has one turn at a time")
        given = list(ids)
        if given[: len(self.ids)] != self.ids:
            at = next(
                (i for i, pair in enumerate(zip(given, self.ids, strict=False)) if pair[0] != pair[1]), len(given)
            )
            raise ValueError(f"generate(ids): ids must begin with client.ids, and differ from them at token {at}")
        self._turn = asyncio.get_running_loop().create_future()
        try:
            self._say(Generate(self.id, given, list(stop_ids)))
            made = await self._turn
        finally:
            self._turn = None
        self.ids = [*given, *made.tokens]
        return Turn(made.tokens, made.finish)

    def take(self, turn: Generated) -> None:
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(turn)
