"""Busy servers, broken connections and lost replies: a real proxy that fails stands before a real server."""

import asyncio
import random
import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from graphkiln.storage.conditional import ConditionalFilesystem
from graphkiln.storage.digests import digest_bytes
from graphkiln.storage.errors import StoreUnavailableError
from graphkiln.storage.leases import LeaseRecord, Leases
from graphkiln.storage.locations import open_filesystem
from graphkiln.storage.store import Store
from graphkiln.storage.verify import verify_store
from tests.storage.azure_server import azure_options
from tests.storage.faulty_proxy import FAULTS, FaultyProxy
from tests.storage.gcs_server import gcs_options
from tests.storage.s3_servers import BUCKET, options_for
from tests.storage.samples import OUTPUTS, compile_toy, load_toy


class Kind(NamedTuple):
    """A kind of object store.

    Attributes:
        scheme: of its URLs.
        endpoint: the fixture of its server.
        options: what fsspec gets for that server.
        put: the method of a write.
        delete_many: the method of deleting many objects.
    """

    scheme: str
    endpoint: str
    options: Callable[[str], dict[str, str]]
    put: str
    delete_many: str


KINDS = {
    "s3": Kind("s3", "s3_endpoint", options_for, "PUT", "POST"),
    "gcs": Kind("gs", "gcs_endpoint", gcs_options, "POST", "DELETE"),
    "azure": Kind("az", "azure_endpoint", azure_options, "PUT", "DELETE"),
}
PARAMETERS = [
    pytest.param(name, marks=[getattr(pytest.mark, name), pytest.mark.xdist_group(name)], id=name) for name in KINDS
]


@pytest.fixture(scope="module", params=PARAMETERS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def running_proxy(request: pytest.FixtureRequest, kind: Kind) -> Iterator[FaultyProxy]:
    with FaultyProxy(request.getfixturevalue(kind.endpoint)).running() as running:
        yield running


@pytest.fixture
def proxy(running_proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> FaultyProxy:
    """The proxy, before which no client waits long."""
    monkeypatch.setattr(random, "random", lambda: 0.001)
    monkeypatch.setattr("gcsfs.retry.min", lambda *values: 0.001, raising=False)
    monkeypatch.setattr(
        "azure.storage.blob._shared.policies_async.ExponentialRetry.get_backoff_time", lambda *settings: 0.001
    )
    monkeypatch.setattr(
        "azure.storage.blob.aio._download_async.asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": _no_sleep})
    )
    running_proxy.reset()
    return running_proxy


async def _no_sleep(seconds: float) -> None:
    await asyncio.sleep(0)


@pytest.fixture
def filesystem(proxy: FaultyProxy, kind: Kind) -> ConditionalFilesystem:
    made = open_filesystem(f"{kind.scheme}://{BUCKET}/{uuid.uuid4().hex}", kind.options(proxy.url))
    assert isinstance(made, ConditionalFilesystem)
    return made


MANY = [(f"many/{number}", b"%d" % number * 10) for number in range(20)]

# What is done after `there` was created, the method whose requests fail, and what it answers. Of a write that has
# happened though its reply was lost, some cannot say that it was theirs.
OPERATIONS: dict[str, tuple[str, Callable[[ConditionalFilesystem], object], object, object]] = {
    "read": ("GET", lambda fs: fs.read("there"), b"x" * 1000, b"x" * 1000),
    "create": ("put", lambda fs: fs.create("a", b"new"), True, False),
    "replace": ("put", lambda fs: fs.replace("there", b"new", expected=b"x" * 1000), True, True),
    "replace none": ("put", lambda fs: fs.replace("a", b"new", expected=None), True, True),
    "remove": ("DELETE", lambda fs: fs.remove("there", expected=b"x" * 1000), True, False),
    "delete": ("DELETE", lambda fs: fs.delete("there"), None, None),
    "entries": ("GET", lambda fs: [entry.path for entry in fs.entries("")], ["there"], ["there"]),
    "create many": ("put", lambda fs: fs.create_many(MANY), {True}, {True, False}),
    "read many": ("GET", lambda fs: fs.read_many(["there"] * 20), [b"x" * 1000] * 20, [b"x" * 1000] * 20),
    "delete many": ("delete_many", lambda fs: fs.delete_many(["there"]), None, None),
}
LEAVES: dict[str, dict[str, bytes]] = {
    "create": {"there": b"x" * 1000, "a": b"new"},
    "replace": {"there": b"new"},
    "replace none": {"there": b"x" * 1000, "a": b"new"},
    "create many": {"there": b"x" * 1000, **dict(MANY)},
    "remove": {},
    "delete": {},
    "delete many": {},
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_outlasts_faults_that_pass(
    kind: Kind, proxy: FaultyProxy, filesystem: ConditionalFilesystem, operation: str, fault: str
) -> None:
    method, act, answer, answer_if_lost = OPERATIONS[operation]
    filesystem.create("there", b"x" * 1000)
    proxy.fail_first(2, fault, getattr(kind, method, method))
    found = act(filesystem)
    if isinstance(found, list) and found and isinstance(found[0], bool):
        found = set(found)  # how many of them is for chance to say
    if fault == "reply cut":  # some answers have nothing that could be missing
        assert found in (answer, answer_if_lost)
    else:
        assert found == (answer_if_lost if fault == "reply lost" else answer)
    left = {entry.path: filesystem.read(entry.path) for entry in filesystem.entries("")}
    assert left == LEAVES.get(operation, {"there": b"x" * 1000})


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_that_do_not_pass_end_after_a_bounded_number_of_tries(
    kind: Kind, proxy: FaultyProxy, filesystem: ConditionalFilesystem, fault: str
) -> None:
    store = Store(filesystem)
    ref = store.put_blob(b"content")
    proxy.fault = lambda method, path: fault
    proxy.asked.clear()
    with pytest.raises(StoreUnavailableError) as caught:
        store.get_blob(ref, "a blob")
    assert (caught.value.reason, caught.value.retryable) == ("store-io", True)
    secrets = [value for name, value in kind.options(proxy.url).items() if name in ("secret", "connection_string")]
    assert not any(secret in str(caught.value) for secret in secrets)
    # aiohttp, below the others, repeats what a connection that was used before did not answer.
    assert 3 <= len(proxy.asked) <= 24


def test_of_many_objects_one_that_cannot_be_written_hides_no_others(
    proxy: FaultyProxy, filesystem: ConditionalFilesystem
) -> None:
    proxy.fault = lambda method, path: "server fault" if path.endswith("/many/7") else None
    answers = dict(zip(dict(MANY), filesystem.create_many(MANY), strict=True))
    assert isinstance(answers.pop("many/7"), OSError)
    assert set(answers.values()) == {True}
    found = dict(zip(dict(MANY), filesystem.read_many(list(dict(MANY))), strict=True))
    assert isinstance(found.pop("many/7"), OSError)
    assert found == {path: data for path, data in MANY if path != "many/7"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_whose_every_request_fails_once_leaves_what_it_should(
    kind: Kind, proxy: FaultyProxy, filesystem: ConditionalFilesystem, fault: str
) -> None:
    """Each object is written exactly once, and nobody is told of damage or of a conflict with oneself."""
    proxy.fail_once_each(fault, ("PUT", "GET", "DELETE", "POST"))
    store = Store(filesystem)
    complete = compile_toy(store)
    assert load_toy(store, complete.variant) == OUTPUTS
    assert verify_store(store).problems == ()
    written = [status for method, status in proxy.seen if method == kind.put and status in (200, 201)]
    names = list(filesystem.names(""))
    assert len(written) == len(names) + 1  # and the probe, which is taken away


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lease_whose_reply_was_lost_is_held_renewed_and_given_back(
    kind: Kind, proxy: FaultyProxy, filesystem: ConditionalFilesystem, fault: str
) -> None:
    store, key = Store(filesystem), digest_bytes(b"an action")
    with Leases(store, seconds=1000.0) as leases:
        proxy.fail_first(1, fault, kind.put)
        lease = leases.take(key)
        assert isinstance(lease, LeaseRecord)
        before = store.read_lease(key)
        proxy.fail_first(1, fault, kind.put)
        leases.renew()
        assert store.read_lease(key) not in (None, before)
        proxy.fail_first(1, fault, "DELETE")
        leases.release(lease)
        assert store.read_lease(key) is None


def test_the_number_of_requests_is_the_least_that_there_can_be(
    kind: Kind, proxy: FaultyProxy, filesystem: ConditionalFilesystem
) -> None:
    def requests(act: Callable[[], object]) -> list[str]:
        proxy.asked.clear()
        act()
        return [method for method, _ in proxy.asked]

    many = ["POST"] if kind.scheme == "s3" else ["DELETE"] * len(MANY)
    assert requests(lambda: filesystem.create("a", b"x")) == [kind.put]
    assert requests(lambda: filesystem.create("a", b"x")) == [kind.put]
    assert requests(lambda: filesystem.read("a")) == ["GET"]
    assert requests(lambda: filesystem.replace("a", b"y", expected=b"x")) == ["GET", kind.put]
    assert requests(lambda: filesystem.create_many(MANY)) == [kind.put] * len(MANY)
    assert requests(lambda: filesystem.read_many([path for path, _ in MANY])) == ["GET"] * len(MANY)
    assert requests(lambda: list(filesystem.entries(""))) == ["GET"]
    assert requests(lambda: filesystem.remove("a", expected=b"y")) == ["GET", "DELETE"]
    assert requests(lambda: filesystem.delete("many/1")) == ["DELETE"]
    assert requests(lambda: filesystem.delete_many([path for path, _ in MANY])) == many
    assert list(filesystem.names("")) == []
