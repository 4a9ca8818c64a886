"""Work that several threads do ahead of the one that takes the results."""

import collections

AHEAD = 3  # calls for each thread that run, wait, or have a result that is not taken yet: what bounds the memory


def in_order(pool, threads, calls):
    """Results of calls (function, *arguments), in their order, made by a pool of so many threads."""
    waiting = collections.deque()
    for call in calls:
        waiting.append(pool.submit(*call))
        if len(waiting) > AHEAD * threads:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
