"""The stages without Prefect's engine."""

from graphkiln.tasks.session import CompileSession, Report


def run_direct(session: CompileSession) -> Report:
    """Run all stages of one network, and report.

    Raises:
        BadInputError: the frontend refuses the network.
        CompileFailedError: the frontend's process failed. A kernel graph that fails is reported, not raised.
    """
    session.all_cached()  # side by side, and most runs need no more
    started = {key: session.start(key) for key in session.wanted}
    return session.commit({key: future.result() for key, future in started.items()})
