"""Random schedules for the scheduler: sequences that come, run, are aborted and end, on replicas that come and go.

The schedule performs what the scheduler proposes, and holds each proposal against its own books.
"""

from dataclasses import dataclass, field
from random import Random

from pipeline.core.iteration import IterationCost
from pipeline.core.scheduler import HEADROOM_TOKENS, Scheduler, WaitingQueue, price

COSTS = (
    IterationCost(weights_s=0.004, kv_s=2e-7, compute_s=4e-5, overhead_s=0.002, prefill_s=2e-5),
    IterationCost(weights_s=0.008, kv_s=4e-7, compute_s=8e-5, overhead_s=0.004, prefill_s=4e-5),  # half as fast
    IterationCost(weights_s=0.001, experts_s=0.004, miss=0.94, kv_s=5e-8, overhead_s=0.002, prefill_s=1e-5),
    None,
)
BACKLOG_S, REST_TOKENS, PROMPT_TOKENS = 1.0, 2000.0, 300.0
MAX_STEPS, MAX_ROUNDS = 14, 3000


@dataclass(slots=True, eq=False)
class Response:
    id: int
    step: int
    length: float
    generated: float = 0.0

    @property
    def turn(self) -> tuple[int, float, int]:
        return self.step, -self.generated, self.id


@dataclass(slots=True, eq=False)
class Engine:
    index: int
    cost: IterationCost | None
    max_num_seqs: int
    kv_tokens: float
    running: dict[int, Response] = field(default_factory=dict)
    prefilled_at: float = 0.0

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def context(self) -> float:
        return sum(PROMPT_TOKENS + s.generated for s in self.running.values())

    @property
    def held(self) -> float:
        return self.context

    def prompt_tokens(self, sequence: Response, /) -> float:
        return PROMPT_TOKENS

    def room(self, sequence: Response) -> bool:
        need = self.context + PROMPT_TOKENS + sequence.generated + HEADROOM_TOKENS * (self.num_running + 1)
        return not self.running or (self.num_running < self.max_num_seqs and need <= self.kv_tokens)


class Schedule:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.is_tight = self.random.random() < 0.5
        self.has_costs = self.random.random() < 0.8
        self.scheduler: Scheduler[Response, Engine] = Scheduler(BACKLOG_S, REST_TOKENS)
        self.queue: WaitingQueue[Response] = WaitingQueue()
        self.books: dict[int, Response] = {}
        """Those that wait, by what this schedule did."""
        self.engines: dict[int, Engine] = {}
        self.now, self.asked_at = 0.0, float("inf")
        self.num_made = self.num_done = self.num_engines = self.num_aborted = self.step = 0

    # --- what happens

    def arrive(self) -> None:
        self.step += self.random.random() < 0.3
        new = [
            Response(self.num_made + i, self.step - (self.step > 0 and self.random.random() < 0.3), length)
            for i, length in enumerate(self.random.choices((50, 500, 3000, 9000), k=self.random.randint(1, 12)))
        ]
        self.num_made += len(new)
        self.wait(new)

    def shift_up(self) -> None:
        if len(self.engines) < 6:
            kv = self.random.choice((4_000.0, 20_000.0, 1e9)) if self.is_tight else 1e9
            cost = self.random.choice(COSTS) if self.has_costs else None
            engine = Engine(self.num_engines, cost, self.random.choice((2, 4, 16)), kv, prefilled_at=self.now)
            self.num_engines += 1
            self.engines[engine.index] = engine
            self.scheduler.offer(engine)

    def shift_down(self) -> None:
        if self.engines:
            engine = self.engines.pop(self.random.choice(list(self.engines)))
            self.scheduler.withdraw(engine)
            self.wait(engine.running.values())

    def pass_time(self) -> None:
        """All that run get tokens; those that are long enough end; a full cache gives one back."""
        self.now = min(self.asked_at, self.now + self.random.choice((0.05, 1.0, 10.0)))
        if self.asked_at <= self.now:
            self.asked_at = float("inf")
        tokens = self.random.choice((10.0, 400.0, 3000.0))
        for engine in self.engines.values():
            if not engine.running or engine.prefilled_at > self.now:
                continue
            for sequence in list(engine.running.values()):
                sequence.generated = min(sequence.length, sequence.generated + tokens)
                if sequence.generated == sequence.length:
                    del engine.running[sequence.id]
                    self.num_done += 1
            if engine.context > engine.kv_tokens and engine.num_running > 1:
                self.wait([engine.running.pop(max(engine.running))])
            self.scheduler.offer(engine)

    def migrate(self) -> None:
        if self.books:
            return
        for engine, num in self.scheduler.migrations(self.engines.values(), self.now):
            assert 0 < num <= engine.num_running
            out = sorted(engine.running.values(), key=lambda s: (s.generated, s.id))[:num]
            for sequence in out:
                del engine.running[sequence.id]
            self.num_aborted += num
            self.wait(out)
            self.scheduler.offer(engine)

    def wait(self, sequences: object) -> None:
        given = list(sequences)  # type: ignore[call-overload]
        self.queue.put(given)
        self.books.update((s.id, s) for s in given)

    # --- what is proposed

    def fill(self) -> None:
        for sequence, engine in self.scheduler.dispatches(self.queue, self.now, self.ask_again):
            assert self.engines.get(engine.index) is engine, "it is there"
            assert sequence is min(self.books.values(), key=lambda s: s.turn), "nobody is overtaken"
            assert engine.room(sequence) and engine.prefilled_at - BACKLOG_S <= self.now, "it fits"
            if not self.is_tight:
                self.check_best(engine, sequence)
            del self.books[sequence.id]
            rate = engine.cost.prefill_s if engine.cost else 0.0
            engine.prefilled_at = max(engine.prefilled_at, self.now)
            engine.prefilled_at += rate * (PROMPT_TOKENS + sequence.generated)
            engine.running[sequence.id] = sequence
        self.check()

    def ask_again(self, when: float) -> None:
        assert when > self.now
        self.asked_at = min(self.asked_at, when)

    def check_best(self, chosen: Engine, sequence: Response) -> None:
        def asks(engine: Engine) -> float:
            cost = engine.cost or IterationCost(per_sequence_s=1.0)
            wait_s = max(0.0, engine.prefilled_at - BACKLOG_S - self.now)
            return price(cost, engine.num_running, engine.context, REST_TOKENS) + wait_s / REST_TOKENS

        others = [asks(engine) for engine in self.engines.values() if engine.room(sequence)]
        assert asks(chosen) <= min(others) + 1e-12

    def check(self) -> None:
        running = [i for engine in self.engines.values() for i in engine.running]
        queued = [s.id for s in self.queue.waiting()]
        assert sorted(queued) == sorted(self.books), "the queue holds what waits"
        assert len(running) == len(set(running)) and not set(running) & set(queued), "in one place"
        assert len(running) + len(queued) + self.num_done == self.num_made, "nothing is lost"
        assert all(e.num_running <= e.max_num_seqs for e in self.engines.values())
        if queued and self.engines and not self.asked_at < float("inf"):
            assert all(engine.running for engine in self.engines.values()), "who idles is given work"

    # --- from begin to end

    def play(self) -> None:
        acts = (self.arrive, self.shift_up, self.shift_down, self.pass_time, self.pass_time, self.migrate)
        for act in (self.shift_up, self.arrive, *self.random.choices(acts, k=self.random.randint(1, MAX_STEPS))):
            act()
            self.fill()
        if not self.engines:
            self.shift_up()
        for _ in range(MAX_ROUNDS):
            if self.num_done == self.num_made:
                break
            self.fill()
            self.pass_time()
        assert self.num_done == self.num_made, "nobody starves"
