import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln.storage.errors import DamagedStoreError
from graphkiln.tasks.artifacts import ALL_OUTPUTS, pack, unpack
from tests.storage.samples import QUICK, flipped

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=5) | st.just(ALL_OUTPUTS)


@QUICK
@given(st.dictionaries(names, st.binary(max_size=40), max_size=5))
def test_what_is_packed_comes_back_from_one_blob(outputs: dict[str, bytes]) -> None:
    stored = pack(outputs)
    assert len(stored) == 1
    assert unpack(stored) == outputs
    assert list(unpack(stored)) == list(outputs)


def test_a_single_output_is_stored_as_it_is() -> None:
    assert pack({"kernel.so": b"\x7fELF"}) == {"kernel.so": b"\x7fELF"}


PACKED = pack({"executable": b"\x7fELF" * 3, "contract": b"{}", "empty": b""})[ALL_OUTPUTS]


def _refused(packed: bytes) -> bool:
    try:
        unpack({ALL_OUTPUTS: packed})
    except DamagedStoreError as error:
        return error.reason == "wrong-content"
    return False


def test_what_was_never_packed_is_refused() -> None:
    assert all(_refused(PACKED[:length]) for length in range(len(PACKED)))
    assert _refused(PACKED + b"\0")
    head = len(PACKED) - 14
    for position in range(head):
        for mask in (0x01, 0x80):
            assert _refused(flipped(PACKED, position, mask)) or _renamed(flipped(PACKED, position, mask))


def _renamed(packed: bytes) -> bool:
    """Tell whether this is what another backend might have packed."""
    return pack(unpack({ALL_OUTPUTS: packed}))[ALL_OUTPUTS] == packed


@pytest.mark.parametrize("contents", [b'[["a",-1],["b",1]]', b'[["a",1],["a",1]]', b'[["a"]]', b"{}", b'[["a",1.5]]'])
def test_a_list_that_nobody_writes_is_refused(contents: bytes) -> None:
    assert _refused(len(contents).to_bytes(8, "big") + contents + b"xx")
