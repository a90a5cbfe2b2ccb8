"""A reward function as verl takes it: unchanged, whether plain or async."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 for the right answer; whether it has the right digits is only counted."""
    answer = solution_str.rsplit(";", 1)[-1]
    return {"score": float(answer == ground_truth), "has_digits": float(sorted(answer) == sorted(ground_truth))}


async def brevity(data_source, solution_str, ground_truth, extra_info=None, longest=80):
    """From 1 for an empty response to 0 for one of `longest` characters."""
    return max(0.0, 1.0 - len(solution_str) / longest)


def says_it(data_source, solution_str, ground_truth, extra_info=None):
    """1 where the right word stands in the response."""
    words = "".join(c if c.isalnum() else " " for c in solution_str.lower()).split()
    return float(ground_truth.lower() in words)
