"""Where each object lies in a store. No path is made out of user text that was not checked."""

import re
from datetime import UTC, datetime

from graphkiln.storage.digests import Digest, is_digest
from graphkiln.storage.errors import BadInputError

FORMAT = "graphkiln-store.json"
BLOBS, ACTIONS, FAILURES, MANIFESTS, PLANS, REFS = "blobs", "actions", "failures", "manifests", "plans", "refs"
QUARANTINE, LEASES, PINS, CATALOG = "quarantine", "leases", "pins", "catalog"
# Of runs that are at work or have just ended; of variants; of single manifests, whatever becomes of their variants.
RUN_PINS, KEPT_PINS, MANIFEST_PINS = f"{PINS}/runs", f"{PINS}/kept", f"{PINS}/manifests"
# Says that a collector is deleting right now.
SWEEP = "collection/sweep"
# Where objects lie in folders that are named by the first two digits of a digest.
BY_DIGEST = (BLOBS, ACTIONS, FAILURES, MANIFESTS, LEASES)
# A store with any object there has been written to.
IN_USE = (REFS, PLANS, ACTIONS, BLOBS)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_CATALOG_PART = re.compile(rf"{CATALOG}/\d{{8}}T\d{{6}}Z-([0-9a-f]{{64}})\.parquet")


def check_name(what: str, name: str) -> str:
    """Return `name` if it can be a part of a path on every file system.

    Args:
        what: what it names, for the error message.
        name: what the user wrote.

    Raises:
        BadInputError: it cannot.
    """
    if not is_name(name):
        raise BadInputError(
            f"{what} {name!r} is not a valid name: use 1 to 100 letters, digits, '.', '_' and '-', "
            "starting with a letter or digit",
            reason="bad-name",
        )
    return name


def is_name(name: str) -> bool:
    """Tell whether `name` can be a part of a path on every file system."""
    return _NAME.fullmatch(name) is not None


def by_digest(folder: str, digest: Digest) -> str:
    """Return the path of an object that is named by a digest.

    Raises:
        ValueError: it is not one.
    """
    if not is_digest(digest):
        raise ValueError(f"{digest!r} is not a digest")
    return f"{folder}/{digest[:2]}/{digest}"


def by_variant(folder: str, network: str, target: str, variant: Digest) -> str:
    """Return the path of a plan or a ref.

    Raises:
        BadInputError: a name is not valid.
        ValueError: the variant is not a digest.
    """
    if not is_digest(variant):
        raise ValueError(f"{variant!r} is not a digest")
    return f"{by_target(folder, network, target)}/{variant}"


def by_target(folder: str, network: str, target: str) -> str:
    """Return the folder of the plans or refs of a network's target.

    Raises:
        BadInputError: a name is not valid.
    """
    return f"{folder}/{check_name('network', network)}/{check_name('target', target)}"


def digest_of(path: str) -> Digest | None:
    """Return the digest that names the object at a path, or None if none does."""
    name = path.rpartition("/")[2]
    return Digest(name) if is_digest(name) else None


def catalog_part(oldest: datetime, digest: Digest) -> str:
    """Return the path of a part of the catalogue; paths are in the order of their oldest rows.

    Args:
        oldest: the time of its oldest row.
        digest: the digest of its bytes.
    """
    return f"{CATALOG}/{oldest.astimezone(UTC):%Y%m%dT%H%M%SZ}-{digest}.parquet"


def digest_of_catalog_part(path: str) -> Digest | None:
    """Return the digest that the path of a part of the catalogue holds; None if it is the path of something else."""
    match = _CATALOG_PART.fullmatch(path)
    return Digest(match[1]) if match else None
