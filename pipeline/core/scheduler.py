"""Which running task gets which waiting sequence. A policy: it reads and chooses, it changes nothing."""

from collections.abc import Iterable, Mapping


def choose_dispatch(waiting: Iterable[str], load: Mapping[str, int]) -> dict[str, list[str]]:
    """Give each waiting sequence to the task with the least load, in order of waiting.

    `load`: task to number of sequences that it runs. Bound: after the choice the loads of any two tasks that got
    something differ by at most one, so no replica is crowded while another one idles. Ties go to the first task in
    the order of `load`, which makes the choice repeatable.
    """
    loads = dict(load)
    chosen: dict[str, list[str]] = {task: [] for task in loads}
    if not loads:
        return {}
    for seq_id in waiting:
        task = min(loads, key=lambda t: loads[t])
        chosen[task].append(seq_id)
        loads[task] += 1
    return {task: ids for task, ids in chosen.items() if ids}
