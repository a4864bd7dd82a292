"""What must not be shown is found wherever it was given, and taken out of every message."""

import traceback
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from graphkiln.storage.credentials import Credentials
from graphkiln.storage.errors import StoreUnavailableError
from graphkiln.storage.locations import open_filesystem
from graphkiln.storage.s3 import S3Filesystem
from graphkiln.storage.store import Store

SECRET = "wJalr/XUtn+FEMI"  # noqa: S105  # nobody's


@pytest.mark.parametrize(
    ("url", "options", "shown"),
    [
        (f"s3://AKIA:{SECRET}@bucket/a", {}, "s3://bucket/a"),
        ("s3://AKIA:wJalr%2FXUtn%2BFEMI@bucket/a@b", {}, "s3://bucket/a@b"),
        ("sftp://me:wJalrXUtn+FEMI@host:22/a", {}, "sftp://me@host:22/a"),
        ("s3://bucket/a", {"key": "AKIA", "secret": SECRET}, "s3://bucket/a"),
        ("s3://bucket/a", {"client_kwargs": {"aws_secret_access_key": SECRET}}, "s3://bucket/a"),
        ("gs://bucket/a", {"token": {"private": SECRET, "type": "user"}}, "gs://bucket/a"),
        ("az://c/a", {"connection_string": f"AccountName=x;AccountKey={SECRET};"}, "az://c/a"),
        ("sftp://host/a", {"password": 1234567890}, "sftp://host/a"),
    ],
)
def test_secrets_are_found_where_they_were_given(url: str, options: dict[str, Any], shown: str) -> None:
    found = Credentials(url, options)
    assert found.url == shown
    given = [SECRET, "wJalr%2FXUtn%2BFEMI", "wJalrXUtn+FEMI", "1234567890", f"AccountName=x;AccountKey={SECRET};"]
    known = [text for text in given if text in f"{url} {options}"]
    assert known
    hidden = found.hide(f"refused {known[-1]} of {shown}")
    assert hidden == f"refused *** of {shown}"


def test_secrets_of_the_environment_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    assert Credentials("s3://bucket", {}).hide(f"no {SECRET}") == "no ***"


def test_what_is_no_secret_stays() -> None:
    options = {"endpoint_url": "http://127.0.0.1:9000", "key": "x", "anon": False, "config_kwargs": {"read_timeout": 5}}
    found = Credentials("s3://bucket/prefix", options)
    assert found.hide("x http://127.0.0.1:9000 False 5") == "x http://127.0.0.1:9000 False 5"


def test_keys_in_the_url_of_a_bucket_become_options() -> None:
    filesystem = open_filesystem("s3://AKIA:wJalr%2FXUtn+FEMI@bucket/a")
    assert isinstance(filesystem, S3Filesystem)
    assert (filesystem._fs.key, filesystem._fs.secret) == ("AKIA", SECRET)
    assert (filesystem.url, filesystem._bucket, filesystem._prefix) == ("s3://bucket/a", "bucket", "a/")


class Talkative(MemoryFileSystem):  # type: ignore[misc]
    """Says its password in what it raises, or behind it."""

    protocol = "talkative"
    cachable = False

    def __init__(self, password: str, **options: Any) -> None:
        super().__init__(**options)
        self.password = password

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> bytes:
        try:
            raise RuntimeError(f"login with {self.password} refused")
        except RuntimeError as error:
            raise OSError(5, f"no answer to {self.password}" if "direct" in path else "no answer") from error


@pytest.fixture
def talkative() -> Iterator[None]:
    fsspec.register_implementation("talkative", Talkative, clobber=True)
    yield
    MemoryFileSystem.store.clear()


@pytest.mark.parametrize("path", ["direct", "behind"])
def test_not_even_a_traceback_says_a_secret(talkative: None, path: str) -> None:
    store = Store(open_filesystem("talkative://host/x", {"password": SECRET}))
    with pytest.raises(StoreUnavailableError) as caught:
        store.read_raw(path)
    assert "no answer" in str(caught.value)
    told = "".join(traceback.format_exception(caught.value))
    assert "no answer" in told
    assert SECRET not in told
