"""GraphKiln compiles machine-learning networks for large clusters as explicit, content-addressed stages.

The names below are imported when they are first used, so that `import graphkiln` costs a trainer nothing.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphkiln.flows.bundles import export_bundle, import_bundle
    from graphkiln.flows.trainer import ensure, load
    from graphkiln.storage.errors import (
        BadInputError,
        CompileFailedError,
        DamagedStoreError,
        GraphKilnError,
        NotCommittedError,
        StoreUnavailableError,
        UntrustedError,
    )
    from graphkiln.storage.store import Store, open_store
    from graphkiln.tasks.contracts import Program
    from graphkiln.tasks.network import CompiledNetwork
    from graphkiln.tasks.spec import NetworkSpec, TargetSpec

__version__ = "0.1.0"

__all__ = [
    "BadInputError",
    "CompileFailedError",
    "CompiledNetwork",
    "DamagedStoreError",
    "GraphKilnError",
    "NetworkSpec",
    "NotCommittedError",
    "Program",
    "Store",
    "StoreUnavailableError",
    "TargetSpec",
    "UntrustedError",
    "__version__",
    "ensure",
    "export_bundle",
    "import_bundle",
    "load",
    "open_store",
]

_HOMES = {
    "flows.bundles": ("export_bundle", "import_bundle"),
    "flows.trainer": ("ensure", "load"),
    "storage.errors": (
        "BadInputError",
        "CompileFailedError",
        "DamagedStoreError",
        "GraphKilnError",
        "NotCommittedError",
        "StoreUnavailableError",
        "UntrustedError",
    ),
    "storage.store": ("Store", "open_store"),
    "tasks.contracts": ("Program",),
    "tasks.network": ("CompiledNetwork",),
    "tasks.spec": ("NetworkSpec", "TargetSpec"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
