"""Commands that make and show the keys with which commits are signed."""

import shlex
from pathlib import Path

import click

from graphkiln.flows.commands.common import errors_as_json, json_option, out, print_json, print_text
from graphkiln.storage.signing_keys import SIGNING_KEY, TRUSTED_KEYS, PublicKey, new_signing_key, read_public_keys


@click.group("keys")
def keys_group() -> None:
    """Make and show the keys with which commits are signed."""


@keys_group.command("new")
@click.argument("file", type=click.Path(path_type=Path))
@json_option
def new_command(file: Path, as_json: bool) -> int:
    """Write a new Ed25519 key to FILE, and its public half to FILE.pub."""
    with errors_as_json(as_json):
        public = new_signing_key(file).public
    if as_json:
        print_json({"private": str(file), "public": f"{file}.pub", **_described(public)})
        return 0
    for line in (
        f"{file} is the private key: keep it where nobody else can read it",
        f"{file}.pub is its public half, {public.id}",
        f"where networks are compiled: export {SIGNING_KEY}={shlex.quote(str(file.absolute()))}",
        f"where they are used: export {TRUSTED_KEYS}=… with the path of a copy of {file}.pub",
    ):
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


@keys_group.command("show")
@click.argument("file", type=click.Path(path_type=Path))
@json_option
def show_command(file: Path, as_json: bool) -> int:
    """Show the public keys of FILE, a private key or a file of trusted keys: each one's line and fingerprint."""
    with errors_as_json(as_json):
        keys = read_public_keys(file)
    if as_json:
        print_json({"keys": [_described(key) for key in keys]})
    for key in keys * (not as_json):
        print_text(f"{key.line}\n  {key.id}")
    return 0


def _described(key: PublicKey) -> dict[str, str]:
    return {"id": key.id, "comment": key.comment, "line": key.line}
