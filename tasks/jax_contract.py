"""The call contract of a JAX program, as JSON: what the `jax` frontend and the `xla` backend agree on.

A program without its Python is a module and this contract: the trees of its arguments and results, their shapes
and dtypes, which arguments the module keeps, and which it may overwrite. Nothing here is pickled, and only
`decode_tree`, `decode_dtype` and the helpers for shardings import JAX.
"""

import importlib
import sys
from typing import Any

import msgspec

from graphkiln.storage.canonical import Json, canonical_json, parse_json
from graphkiln.storage.errors import BadInputError

PAYLOAD_FORMAT = "jax-export/1"
MODULE_NAME = "kernel_graph"

_MAGIC = b"graphkiln jax-export 1\n"
_LENGTH_BYTES = 8
_LEAF = "*"
# The names that JAX prints for the dtypes of PRNG keys, and the names by which they are asked for.
_KEY_DTYPES = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


class ArrayType(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Type of one argument or result: shape, name of the dtype, and whether JAX may promote it like a scalar."""

    shape: tuple[int, ...]
    dtype: str
    weak: bool


class CallContract(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a program is called.

    Attributes:
        platform: what it was lowered for.
        devices: how many devices it runs on.
        arguments: tree of ``(args, kwargs)``; see `encode_tree`.
        results: tree of what it returns.
        argument_types: one for each leaf of `arguments`, dropped ones included.
        result_types: one for each leaf of `results`.
        kept: positions of the leaves that the module takes; the others do not matter to the result.
        donated: positions of the leaves whose memory it may overwrite.
    """

    platform: str
    devices: int
    arguments: Any  # JSON; msgspec cannot follow the recursive type
    results: Any
    argument_types: tuple[ArrayType, ...]
    result_types: tuple[ArrayType, ...]
    kept: tuple[int, ...]
    donated: tuple[int, ...]


def encode_payload(contract: CallContract, exported: bytes) -> bytes:
    """Return a payload: the contract as canonical JSON, preceded by its length, then the exported program."""
    header = canonical_json(msgspec.to_builtins(contract))
    return _MAGIC + len(header).to_bytes(_LENGTH_BYTES, "big") + header + exported


def decode_payload(payload: bytes) -> tuple[CallContract, bytes]:
    """Return what `encode_payload` was given.

    Raises:
        BadInputError: the bytes are something else.
    """
    start = len(_MAGIC) + _LENGTH_BYTES
    end = start + int.from_bytes(payload[len(_MAGIC) : start], "big")
    if not payload.startswith(_MAGIC) or len(payload) < end:
        raise BadInputError(f"the payload is not of the format {PAYLOAD_FORMAT}", reason="bad-payload")
    try:
        contract = msgspec.convert(parse_json(payload[start:end]), CallContract)
    except (ValueError, msgspec.ValidationError) as error:
        raise BadInputError(f"the payload's contract cannot be read: {error}", reason="bad-payload") from error
    return contract, payload[end:]


class UnsupportedTypeError(ValueError):
    """A tree or a dtype that the contract has no words for; the message says what to use instead."""


def encode_tree(treedef: Any) -> Json:
    """Return a `PyTreeDef` as JSON: leaves, None, tuples, lists, dicts and importable named tuples.

    Raises:
        UnsupportedTypeError: it has another kind of node, or a dict key that is neither text nor a whole number.
    """
    node = treedef.node_data()
    if node is None:
        return _LEAF if treedef.num_leaves == 1 else None
    kind, data = node
    children = [encode_tree(child) for child in treedef.children()]
    if kind is type(None):
        return None
    if kind is tuple or kind is list:
        return [kind.__name__, *children]
    if kind is dict:
        return ["dict", *([_checked_key(key), child] for key, child in zip(data, children, strict=True))]
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return ["named", _importable_name(kind), list(kind._fields), *children]
    raise UnsupportedTypeError(
        f"{kind.__module__}.{kind.__qualname__} is a pytree node of its own kind, which a process without the "
        "network's Python cannot rebuild: pass dicts, lists, tuples or named tuples instead"
    )


def _checked_key(key: Any) -> Json:
    if type(key) in (str, int):
        return key  # type: ignore[no-any-return]
    raise UnsupportedTypeError(f"the dict key {key!r} is neither text nor a whole number")


def _importable_name(kind: type) -> str:
    try:
        found: Any = importlib.import_module(kind.__module__)
        for part in kind.__qualname__.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        found = None
    # A file whose name is no module's is known under a name in angle brackets, while it is parsed.
    if found is not kind or kind.__module__ == "__main__" or "<" in kind.__module__:
        raise UnsupportedTypeError(
            f"the named tuple {kind.__qualname__} cannot be imported from a module named {kind.__module__}: define it "
            "at the top of a module that the trainer can import as well"
        )
    return f"{kind.__module__}:{kind.__qualname__}"


def decode_tree(tree: Json) -> Any:
    """Return the `PyTreeDef` that `encode_tree` was given.

    Raises:
        BadInputError: it holds a named tuple that cannot be imported here, or that has other fields by now.
    """
    import jax

    return jax.tree_util.tree_structure(_example(tree))


def _example(tree: Json) -> Any:
    if not isinstance(tree, list):
        return tree
    match tree:
        case ["tuple", *children]:
            return tuple(_example(child) for child in children)
        case ["list", *children]:
            return [_example(child) for child in children]
        case ["dict", *items]:
            return {item[0]: _example(item[1]) for item in items}  # type: ignore[index]
        case ["named", str(name), list(fields), *children]:
            return _named_tuple(name, fields)(*(_example(child) for child in children))
    raise BadInputError(f"{tree!r} is not a tree of arguments or results", reason="bad-contract")


def _named_tuple(name: str, fields: list[Json]) -> Any:
    module, _, path = name.partition(":")
    # What an artifact names is never imported: that would run code that the caller has not chosen.
    if module not in sys.modules:
        raise BadInputError(
            f"the program takes or returns the named tuple {path} of {module}: import {module} before it is loaded",
            reason="named-tuple-not-imported",
        )
    found: Any = sys.modules[module]
    for part in path.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, tuple)) or list(getattr(found, "_fields", ())) != fields:
        raise BadInputError(
            f"the named tuple {path} of {module} no longer has the fields {fields}: compile again",
            reason="named-tuple-changed",
        )
    return found


def encode_type(aval: Any) -> ArrayType:
    """Return the type of an argument or result.

    Raises:
        UnsupportedTypeError: its shape is not made of numbers, or its dtype is not one of NumPy's, ml_dtypes' or
            JAX's own PRNG keys.
    """
    name = str(aval.dtype)
    if "<" in name and name not in _KEY_DTYPES:
        raise UnsupportedTypeError(f"arrays of the dtype {name} cannot be passed to a compiled program")
    if not all(isinstance(size, int) for size in aval.shape):
        raise UnsupportedTypeError(f"the shape {aval.shape} is symbolic: compile one program for each size")
    return ArrayType(tuple(aval.shape), name, bool(aval.weak_type))


def decode_type(array_type: ArrayType) -> Any:
    """Return the abstract value that JAX uses for `array_type`."""
    import jax

    if array_type.dtype in _KEY_DTYPES:
        dtype = jax.eval_shape(lambda: jax.random.key(0, impl=_KEY_DTYPES[array_type.dtype])).dtype
    else:
        dtype = jax.numpy.dtype(array_type.dtype)
    return jax.core.ShapedArray(array_type.shape, dtype, weak_type=array_type.weak)


def strip_module(module: Any) -> None:
    """Remove from an MLIR module, in place, what differs between two lowerings of one program.

    Debug locations hold paths, line numbers and the call stack; the module's name holds the function's. The names of
    functions that are jitted inside another one remain: renaming them makes another payload.
    """
    from jax.extend.mlir import ir, passmanager

    with module.context:
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
        module.operation.attributes["sym_name"] = ir.StringAttr.get(MODULE_NAME)
