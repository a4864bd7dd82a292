"""(warm_s3) What a warm start asks of an S3 server: the first rank of a host, the next one, and `ensure`."""

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.measure import Cost, Count, CountTable
from benchmarks.process_clock import read_seconds
from benchmarks.workspace import MIXTRAL, NETWORK, TARGET, Workspace
from graphkiln.storage.local import LocalFilesystem
from graphkiln.storage.locations import open_filesystem

if TYPE_CHECKING:
    from tests.storage.faulty_proxy import FaultyProxy

FIRST_GOAL, SECOND_GOAL = 12, 3
KERNELS = {f"kernel{number}": f"int run(int x) {{ return x + {number}; }}" for number in range(8)}


class _Start(NamedTuple):
    """Requests by method, and seconds."""

    requests: Counter[str]
    cost: Cost


def measure(workspace: Workspace) -> CountTable:
    """Put two networks of eight kernel graphs on a server, and start from there."""
    # The other parts need neither S3's client nor a server.
    from tests.flows import cc_networks
    from tests.storage.faulty_proxy import FaultyProxy
    from tests.storage.s3_servers import seaweedfs

    kernels = cc_networks.CcNetwork(workspace.new("kernels"), KERNELS)
    local = workspace.new("store")
    workspace.compile(kernels.spec, local, "--no-prefect")
    mixtral, _ = workspace.mixtral_store()
    with seaweedfs(workspace.new("seaweedfs")) as server, FaultyProxy(server).running() as proxy:
        columns = [
            _starts(workspace, proxy, kernels.spec, local, cc_networks.NAME, cc_networks.TARGET),
            _starts(workspace, proxy, MIXTRAL, mixtral, NETWORK, TARGET),
        ]
    first, second, ensure = zip(*columns, strict=True)
    return CountTable(
        "(warm_s3) Requests to an S3 server for a warm start of eight kernel graphs",
        ("C kernels", "Mixtral-8x7B"),
        [
            Count("first rank of a host", _totals(first), FIRST_GOAL),
            Count("second rank of the host", _totals(second), SECOND_GOAL),
            Count("  first rank: seconds", [start.cost.wall for start in first]),
            Count("  second rank: seconds", [start.cost.wall for start in second]),
            Count("`ensure` with nothing to compile", _totals(ensure)),
            *(
                Count(f"  of these {method}", [start.requests[method] for start in ensure])
                for method in ("GET", "PUT", "DELETE", "HEAD")
            ),
        ],
        ["Seconds are those of `load` and `load_all` in a fresh process that imports S3's client (and JAX)."],
    )


def _totals(starts: tuple[_Start, ...]) -> list[float]:
    return [start.requests.total() for start in starts]


def _starts(
    workspace: Workspace, proxy: "FaultyProxy", spec: Path, local: Path, name: str, target: str
) -> tuple[_Start, _Start, _Start]:
    from tests.storage.s3_servers import BUCKET, options_for

    url, options = f"s3://{BUCKET}/{name}", options_for(proxy.url)
    source = LocalFilesystem(local)
    objects = [(path, source.read(path)) for path in source.names("")]
    if not all(open_filesystem(url, options).create_many(objects)):
        raise RuntimeError(f"{url} is in use")
    proxy.reset()
    environment = workspace.jax_environment(GRAPHKILN_NODE_CACHE=str(workspace.new("node")))

    def rank() -> _Start:
        done = workspace.script("load_from_s3", url, json.dumps(options), name, target, environment=environment)
        return _Start(_taken(proxy), read_seconds(done.output))

    first, second = rank(), rank()
    given = [word for item in options.items() for word in ("--storage-option", "=".join(item))]
    done = workspace.compile(spec, url, "--no-prefect", *given)
    return first, second, _Start(_taken(proxy), done[0])


def _taken(proxy: "FaultyProxy") -> Counter[str]:
    requests = Counter(method for method, _ in proxy.asked)
    proxy.reset()
    return requests
