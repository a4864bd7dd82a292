"""The documents of a store: what each of them says.

A manifest holds no time, host or run, so that equal artifacts give an equal manifest. The others may.
"""

from datetime import datetime
from typing import Annotated

import msgspec

from graphkiln.storage.blobs import BlobRef
from graphkiln.storage.canonical import Json
from graphkiln.storage.digests import Digest
from graphkiln.storage.keys import KeyPart
from graphkiln.storage.ranks import RankSet

# A time without a zone means another moment on another host.
Moment = Annotated[datetime, msgspec.Meta(tz=True)]

# Network, target and variant.
VariantName = tuple[str, str, Digest]

# As OpenSSH writes the fingerprint of a public key.
KeyId = Annotated[str, msgspec.Meta(pattern=r"^SHA256:[A-Za-z0-9+/]{43}\Z")]


class Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who answers for a document.

    Attributes:
        key: fingerprint of the public key.
        value: the Ed25519 signature, in hexadecimal digits.
    """

    key: KeyId
    value: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{128}\Z")]


class Signed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A document that counts only with a trusted signature, where trusted keys are configured.

    Attributes:
        signature: over everything else in the document; None if nobody signed it.
    """

    signature: Signature | None = None


class StoreFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the whole store is written in."""

    format: int
    digest: str


class NetworkRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The network of a plan.

    Attributes:
        name: its name in the store.
        frontend: the frontend's name.
        entrypoint: what the spec says.
        defaults: the parameters that the spec gave.
        parameters: `defaults` with what the run set over them.
    """

    name: str
    frontend: str
    entrypoint: str
    defaults: dict[str, Json]
    parameters: dict[str, Json]


class TargetRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The target of a plan.

    Attributes:
        name: its name in the spec and in the store.
        backend: the backend's name.
        options: what the spec says.
        platform: what the frontend lowered for.
        settings: the options as the backend resolved them, CPU features included.
    """

    name: str
    backend: str
    options: dict[str, Json]
    platform: str
    settings: dict[str, Json]


class PlannedGraph(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kernel graph of a plan.

    Attributes:
        name: unique in its plan.
        payload: what the backend gets.
        payload_format: how the payload is encoded.
        ranks: who runs it.
        key: the action key of its compilation.
    """

    name: str
    payload: BlobRef
    payload_format: str
    ranks: RankSet
    key: Digest


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the frontend gave for one variant.

    Attributes:
        network: the network, with its parameters.
        target: the target, as resolved.
        variant: digest of parameters, resolved target and toolchain.
        toolchain: fingerprints of frontend and backend.
        graphs: the kernel graphs, in the frontend's order.
    """

    network: NetworkRecord
    target: TargetRecord
    variant: Digest
    toolchain: tuple[KeyPart, ...]
    graphs: tuple[PlannedGraph, ...]

    def title(self) -> str:
        """Return how messages call this variant: network, target and the start of the variant."""
        return f"{self.network.name} for {self.target.name} (variant {self.variant[:12]})"


class PlanDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan as it is stored, mutable, one for each variant.

    Attributes:
        plan: the plan.
        created_at: when it was written, with a time zone.
        previous: the plan document that this one replaced.
        used_at: when a run last found it unchanged, to the day; None if that was never long after it was written.
    """

    plan: Plan
    created_at: Moment
    previous: BlobRef | None
    used_at: Moment | None = None


class CompileStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a compile took.

    Attributes:
        seconds: wall time.
        peak_memory_bytes: largest resident memory of the compiler's process tree.
        host: where it ran.
        finished_at: when it ended, with a time zone.
    """

    seconds: float
    peak_memory_bytes: int
    host: str
    finished_at: Moment


class ActionResult(Signed, frozen=True, forbid_unknown_fields=True):
    """What a successful compile made.

    Attributes:
        key: the action key.
        parts: what the key was made of.
        outputs: the artifact, name by name.
        log: what the compiler printed, if anything.
        stats: what it took.
    """

    key: Digest
    parts: tuple[KeyPart, ...]
    outputs: dict[str, BlobRef]
    log: BlobRef | None
    stats: CompileStats


class FailureRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The last failed compile of an action. It is only ever shown, and never stands in for a run.

    Attributes:
        key: the action key.
        graph: name of the kernel graph in the run that failed.
        backend: the compiler.
        reason: kebab-case word, such as ``"compiler-error"`` or ``"timeout"``.
        retryable: whether it may succeed with nothing changed (killed, disk full).
        message: the compiler's own words.
        log: all that it printed.
        stats: what it took.
        lease: token of the lease under which it ran, so that those who waited for it know it is meant.
    """

    key: Digest
    graph: str
    backend: str
    reason: str
    retryable: bool
    message: str
    log: BlobRef | None
    stats: CompileStats
    lease: str = ""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A complete variant: its plan, and the artifact of each of its kernel graphs."""

    plan: Plan
    artifacts: dict[str, dict[str, BlobRef]]


class Superseded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A manifest that a ref named before.

    Attributes:
        manifest: its digest.
        at: when another one took its place, with a time zone.
    """

    manifest: Digest
    at: Moment


class RefRecord(Signed, frozen=True, forbid_unknown_fields=True):
    """The commit point of one variant.

    Attributes:
        network: the network's name.
        target: the target's name.
        variant: the variant.
        manifest: digest of the manifest's stored bytes.
        committed_at: when the ref was moved there, with a time zone.
        superseded: what it named before, newest first: a trainer may still be loading it. Only the last few are kept.
    """

    network: str
    target: str
    variant: Digest
    manifest: Digest
    committed_at: Moment
    superseded: tuple[Superseded, ...] = ()

    @property
    def variant_name(self) -> VariantName:
        """Whose commit point it is."""
        return self.network, self.target, self.variant


class PinRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What collection must keep, besides what refs and plans name.

    Attributes:
        network: the network that it is about; empty if it is about none, as for the others of this triple.
        target: the target.
        variant: the variant. Its ref and its plan are kept as well, whatever they name.
        reason: for whom or what, for messages.
        created_at: when it was written, with a time zone.
        expires_at: when it ends to hold, with a time zone; None if it holds until it is taken away.
        manifests: manifests to keep with all that they name.
        actions: action results to keep with all that they name.
        blobs: blobs to keep.
    """

    network: str
    target: str
    variant: str
    reason: str
    created_at: Moment
    expires_at: Moment | None
    manifests: tuple[Digest, ...] = ()
    actions: tuple[Digest, ...] = ()
    blobs: tuple[Digest, ...] = ()


class SweepRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A collector is deleting right now what was not pinned before it wrote this.

    Attributes:
        owner: host and process, for messages.
        nonce: another one for each batch.
        seconds: the collector deletes nothing later than this after it wrote this.
    """

    owner: str
    nonce: str
    seconds: float


class QuarantineNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Says what was found wrong with a quarantined object."""

    path: str
    reason: str
    found_at: Moment
