"""What a real Prefect server says of flows, through its REST API."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx

Found = TypeVar("Found")
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


class Server:
    """A Prefect server and its REST API."""

    def __init__(self, url: str, home: Path) -> None:
        self.url = url
        self.home = home
        self.results = home / "results"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PREFECT_API_URL": self.url,
            "PREFECT_HOME": str(self.home),
            "PREFECT_LOCAL_STORAGE_PATH": str(self.results),
            "DO_NOT_TRACK": "1",
        }

    def filter(self, what: str, **wanted: object) -> list[dict[str, Any]]:
        answer = httpx.post(f"{self.url}/{what}/filter", json=wanted, trust_env=False)
        answer.raise_for_status()
        found: list[dict[str, Any]] = answer.json()
        return found

    def flow_run(self, network: str) -> dict[str, Any]:
        """The newest run whose name or parameters have the network's name."""
        runs = self.filter("flow_runs", sort="EXPECTED_START_TIME_DESC", limit=50)
        return next(run for run in runs if network in run["name"] + json.dumps(run["parameters"]))

    def task_runs(self, flow_run: Mapping[str, Any], count: int) -> dict[str, str]:
        """Name -> state of a run's tasks, once there are `count` of them and all have ended."""

        def all_ended() -> list[dict[str, Any]] | None:
            runs = self.filter("task_runs", task_runs={"flow_run_id": {"any_": [flow_run["id"]]}})
            return runs if len(runs) >= count and all(run["state_type"] in FINAL for run in runs) else None

        runs = until(all_ended)
        assert len(runs) == count, [run["name"] for run in runs]
        self.ids = {run["name"]: run["id"] for run in runs}
        return {run["name"]: run["state_name"] for run in runs}

    def log_of(self, task_run: str, text: str) -> str:
        """The log of a task run of the last run that was looked at, once `text` is in it."""

        def with_text() -> str | None:
            lines = self.filter("logs", logs={"task_run_id": {"any_": [self.ids[task_run]]}}, sort="TIMESTAMP_ASC")
            log = "\n".join(line["message"] for line in lines)
            return log if text in log else None

        return until(with_text)

    def artifact(self, flow_run: Mapping[str, Any], kind: str) -> dict[str, Any]:
        """The only artifact of a kind that a run has made."""
        wanted = {"flow_run_id": {"any_": [flow_run["id"]]}, "type": {"any_": [kind]}}
        (found,) = self.filter("artifacts", artifacts=wanted)
        return found


def until(look: Callable[[], Found | None]) -> Found:
    """Wait for what the server learns of late."""
    deadline = time.monotonic() + 60
    while (found := look()) is None:
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return found
