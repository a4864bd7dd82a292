"""What a trainer calls: `ensure` compiles what is missing, `load` only loads what is committed.

`load` imports neither Prefect nor pydantic nor the network's Python, and traces nothing.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphkiln.flows.prefect_server import import_flow, server_configured
from graphkiln.storage import layout
from graphkiln.storage.canonical import Json, canonical_json
from graphkiln.storage.digests import Digest
from graphkiln.storage.errors import (
    BadInputError,
    DamagedStoreError,
    GraphKilnError,
    NotCommittedError,
    UntrustedError,
)
from graphkiln.storage.keys import changed_parts
from graphkiln.storage.plans import toolchain
from graphkiln.storage.records import Manifest
from graphkiln.storage.results import manifest_of
from graphkiln.storage.signing_keys import TrustedKeys
from graphkiln.storage.store import Store, open_store
from graphkiln.tasks.checks import refuse_unknown
from graphkiln.tasks.network import CompiledNetwork
from graphkiln.tasks.registry import load_backend, load_frontend

if TYPE_CHECKING:
    from graphkiln.tasks.session import CompileSession
    from graphkiln.tasks.spec import NetworkSpec

_log = logging.getLogger("graphkiln")


def ensure(
    spec: "NetworkSpec | str | Path",
    *,
    target: str | None = None,
    parameters: Mapping[str, Json] | None = None,
    store: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    trusted_keys: TrustedKeys | None = None,
    jobs: int | None = None,
) -> CompiledNetwork:
    """Compile what is missing, commit, and return the compiled network.

    Runs as a Prefect flow if a Prefect server is configured; if there is none, or it does not answer, without Prefect.
    If the store's disk becomes full, a warning says so, and this process goes on with what it has compiled: nothing is
    committed then, and the next run compiles what could not be kept.
    The store's catalogue gets a row for each kernel graph, unless everything was there and committed.

    Args:
        spec: a `NetworkSpec`, or the path of one in TOML.
        target: one of the spec's targets; the first if None.
        parameters: what to set over the spec's parameters.
        store: URL of the store; ``$GRAPHKILN_STORE`` or the user's cache folder if None.
        storage_options: what fsspec passes to the store's file system.
        trusted_keys: whose signatures count, as files or lines of OpenSSH; ``$GRAPHKILN_TRUSTED_KEYS`` if None.
        jobs: how many compilers may work at once; the number of cores if None.

    Raises:
        BadInputError: the spec, the target, the parameters, the network, a key or the store cannot be used; or
            something has to be made where signatures are required and there is no key to sign with.
        CompileFailedError: a kernel graph did not compile; the message names each one. Nothing was committed.
        StoreUnavailableError: the store's medium failed.
    """
    from graphkiln.tasks.session import open_session
    from graphkiln.tasks.workers import Workers

    with Workers(jobs) as workers:
        session = open_session(
            spec,
            workers,
            target=target,
            parameters=parameters,
            store=store,
            storage_options=storage_options,
            trusted_keys=trusted_keys,
            spills=True,
            record_hits=False,
        )
        _run(session, workers.jobs)
        if session.committed is not None:
            session.pin.leave(session.committed.manifest)
    error = session.report.error(session.resolved.target.backend)
    if error is not None:
        raise error
    # What this run committed: another run of a network of this name may have moved the ref since.
    ref = session.committed
    if ref is None:
        raise RuntimeError(f"{session.resolved.title} has neither failed nor been committed")
    manifest = session.store.read_manifest(ref.manifest, node_cache="fill")
    return CompiledNetwork(manifest, ref.committed_at, session.store)


def _run(session: "CompileSession", jobs: int) -> None:
    if server_configured():
        try:
            import_flow()(session, jobs)
        except BadInputError as error:
            if error.reason != "prefect-server":
                raise
            # Watching a run is not worth losing it.
            _log.warning("%s: going on without Prefect", error)
    if not session.reported:
        from graphkiln.flows.direct import run_direct

        run_direct(session)


def load(
    name: str,
    *,
    target: str,
    parameters: Mapping[str, Json] | None = None,
    store: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    trusted_keys: TrustedKeys | None = None,
) -> CompiledNetwork:
    """Return a committed network, compiling nothing.

    The one variant is taken whose parameters are its spec's defaults with `parameters` over them, and whose
    target and toolchain are those of this host. It is as old as its `committed_at` says: whether the network's
    source has changed since is for `ensure` to find out. If a later run has changed the network without coming to its
    commit, a warning says so.

    Args:
        name: the network's name.
        target: the target's name.
        parameters: what was set over the spec's parameters.
        store: URL of the store; ``$GRAPHKILN_STORE`` or the user's cache folder if None.
        storage_options: what fsspec passes to the store's file system.
        trusted_keys: whose signatures count, as files or lines of OpenSSH; ``$GRAPHKILN_TRUSTED_KEYS`` if None.

    Raises:
        NotCommittedError: no variant suits, or several do; the message lists what there is.
        DamagedStoreError: a document of the store is damaged, and none that is not suits.
        UntrustedError: signatures are required, and a commit has none that is trusted, or is older than one that was
            seen in its place; and none that is trusted suits.
        BadInputError: a parameter is unknown, or a key or the store cannot be read.
    """
    # Each document says itself if a newer GraphKiln wrote it. The store's format is read if nothing suits.
    opened = open_store(store, storage_options, checked=False, trusted_keys=trusted_keys)
    variants = opened.variants(layout.REFS, name, target)
    suiting: list[CompiledNetwork] = []
    others: list[str] = []
    unusable: list[DamagedStoreError | UntrustedError] = []
    for variant in variants:
        try:
            network = _committed(opened, *variant)
            misfit = _misfit(network.manifest, parameters or {})
        except (DamagedStoreError, UntrustedError) as error:
            unusable.append(error)
            continue
        if misfit is None:
            suiting.append(network)
        else:
            others.append(
                f"  variant {network.variant[:12]}, committed {network.committed_at:%Y-%m-%d %H:%M}: {misfit}"
            )
    if len(suiting) == 1:
        _warn_if_outdated(opened, suiting[0])
        return suiting[0]
    opened.read_format()
    if unusable and not suiting:
        raise unusable[0]
    others += [
        f"  {network!r}: suits, with defaults {dict(network.manifest.plan.network.defaults)}" for network in suiting
    ]
    raise _not_committed(opened, name, target, len(suiting), others)


def _warn_if_outdated(store: Store, network: CompiledNetwork) -> None:
    try:
        planned = store.read_plan(network.name, network.target, network.variant)
    except DamagedStoreError:
        planned = None  # the manifest holds all that is needed; `ensure` mends the plan
    if planned is not None and planned.plan != network.manifest.plan:
        _log.warning(
            "%r is outdated: a run on %s changed it and did not commit; compile it again, or load what is meant",
            network,
            f"{planned.created_at:%Y-%m-%d %H:%M:%S %Z}",
        )


def _committed(store: Store, network: str, target: str, variant: Digest) -> CompiledNetwork:
    ref = store.read_ref(network, target, variant)
    if ref is None:
        raise NotCommittedError(
            f"{network} for {target} (variant {variant[:12]}) is not committed", reason="not-committed"
        )
    return CompiledNetwork(manifest_of(store, ref, node_cache="use"), ref.committed_at, store)


def _misfit(manifest: Manifest, parameters: Mapping[str, Json]) -> str | None:
    """Return why a variant is not the one that is asked for on this host, or None if it is."""
    plan = manifest.plan
    network, target = plan.network, plan.target
    refuse_unknown(parameters, network.parameters, what=f"parameter of {network.name}", reason="unknown-parameter")
    wanted = {**network.defaults, **parameters}
    different = [
        name for name in wanted if canonical_json(wanted[name]) != canonical_json(network.parameters.get(name))
    ]
    if different:
        told = ", ".join(f"{name} = {network.parameters.get(name)!r}, not {wanted[name]!r}" for name in different)
        return f"compiled with {told}"
    backend = load_backend(target.backend)
    settings = backend.resolve(target.options).settings
    other = [name for name in settings | target.settings if settings.get(name) != target.settings.get(name)]
    if other:
        return f"compiled for a target that is not this host's ({', '.join(other)} differ)"
    try:
        tools = toolchain(load_frontend(network.frontend).fingerprint(), backend.fingerprint(settings))
    except BadInputError:
        return None  # a host without the compiler, which only runs what others compiled, has no other toolchain
    changes = [change.name for change in changed_parts(plan.toolchain, tools)]
    if changes:
        return f"compiled with another toolchain ({', '.join(changes)} differ)"
    return None


def _not_committed(store: Store, name: str, target: str, suiting: int, others: list[str]) -> GraphKilnError:
    if suiting:
        head = f"{suiting} committed variants of {name} for {target} suit: say which with parameters="
        return NotCommittedError("\n".join([head, *others]), reason="ambiguous")
    head = f"no committed variant of {name} for {target} in {store.url} suits"
    if not others:
        known = sorted({f"{network} for {target}" for network, target, _ in store.variants(layout.REFS)})
        others = [f"  committed there: {', '.join(known) or 'nothing'}"]
    return NotCommittedError(
        "\n".join([f"{head}: compile it with `graphkiln compile` or ensure()", *others]), reason="not-committed"
    )
