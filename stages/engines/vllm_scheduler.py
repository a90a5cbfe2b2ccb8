"""vLLM's scheduler, which also says what it had computed: the engine's outputs do not tell prompts from answers."""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler


class TellingScheduler(Scheduler):
    prefill_tokens = 0
    """Computed by the last step: of prompts, and of what had given way and is computed again."""
    context = 0
    """What the caches of all that took part in the last step held after it."""

    def schedule(self, *arguments: Any, **more: Any) -> SchedulerOutput:
        output = super().schedule(*arguments, **more)
        scheduled = output.num_scheduled_tokens
        begun = {new.req_id for new in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
        self.prefill_tokens = sum(num for id, num in scheduled.items() if num > 1 or id in begun)
        self.context = sum(self.requests[id].num_computed_tokens for id in scheduled)
        return output

    @property
    def held_tokens(self) -> int:
        return sum(request.num_computed_tokens for request in self.running)
