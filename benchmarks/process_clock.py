"""Takes the time of a part of a process that a benchmark runs."""

import json
import time

from benchmarks.measure import Cost


class ProcessClock:
    """Wall and CPU seconds of this process since the clock was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def print_seconds(self) -> None:
        """Print them on one line, for `read_seconds`."""
        print(json.dumps([time.perf_counter() - self._wall, time.process_time() - self._cpu]))


def read_seconds(output: str) -> Cost:
    """Return what `ProcessClock.print_seconds` printed."""
    wall, cpu = json.loads(output)
    return Cost(wall, cpu)
