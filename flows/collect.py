"""The flow `collect`: what no variant and no pin of a store needs any more is taken away."""

from prefect import flow
from prefect.artifacts import create_table_artifact
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from graphkiln.storage.collection import Collector
from graphkiln.storage.errors import GraphKilnError
from graphkiln.storage.quantities import retention_policy
from graphkiln.storage.store import open_for_writing, open_store


@flow(name="collect", persist_result=False)
def collect(
    store: str | None = None,
    keep_last: int | None = None,
    older_than: str | None = None,
    max_size: str | None = None,
    grace: str = "1d",
    dry_run: bool = False,
) -> State:
    """Collect a store, and show what was freed of each network as a table.

    Args:
        store: URL of the store; ``$GRAPHKILN_STORE`` or the user's cache folder if unset.
        keep_last: of each network and target, keep only so many variants, those used last.
        older_than: drop variants that no run has used for so long, such as ``30d``.
        max_size: drop the variants used longest ago until the store fits in this, such as ``200GB``.
        grace: keep whatever was written or replaced within this time.
        dry_run: only say what would be taken away.
    """
    try:
        policy = retention_policy(keep_last=keep_last, older_than=older_than, max_size=max_size, grace=grace)
        opened = open_store(store) if dry_run else open_for_writing(store)
        collector = Collector(opened, policy)
        found = collector.plan() if dry_run else collector.run()
    except GraphKilnError as error:
        return Failed(message=str(error), data=error)
    freed = f"{'would free' if dry_run else 'freed'} {found.freed_bytes} bytes; {found.kept_bytes} bytes are kept"
    create_table_artifact(
        key="collection",
        table=[{"network": item.network, "objects": item.objects, "bytes": item.bytes} for item in found.freed],
        description=freed,
    )
    return Completed(message=freed, data=found)
