"""The `jax` frontend: lowers the programs of a Python entrypoint to StableHLO, without any device.

The entrypoint is ``file.py:callable`` or ``package.module:callable``. It is called with the network's parameters
as keyword arguments and returns its programs by name, as a mapping or as pairs.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from graphkiln.storage.errors import BadInputError
from graphkiln.storage.keys import KeyPart
from graphkiln.storage.ranks import RankSet
from graphkiln.tasks.contracts import KernelGraph, ParseRequest, Program
from graphkiln.tasks.fingerprints import distribution_parts
from graphkiln.tasks.frontends.python_entrypoint import Entrypoint, check_program_name
from graphkiln.tasks.jax_contract import (
    MODULE_NAME,
    PAYLOAD_FORMAT,
    CallContract,
    UnsupportedTypeError,
    encode_payload,
    encode_tree,
    encode_type,
    strip_module,
)

_PLATFORMS = ("cpu", "tpu")


class JaxFrontend:
    """Frontend for networks written with JAX; see `graphkiln.tasks.contracts.Program`."""

    name: ClassVar[str] = "jax"

    def fingerprint(self) -> Sequence[KeyPart]:
        """Return the versions and digests of jax, jaxlib and flatbuffers, which writes the payload.

        Raises:
            BadInputError: one of them is not installed.
        """
        return [part for name in ("jax", "jaxlib", "flatbuffers") for part in distribution_parts(name, extra=self.name)]

    def parse(self, request: ParseRequest) -> Sequence[KernelGraph]:
        """Call the entrypoint and lower each of its programs for `request.platform`.

        Raises:
            BadInputError: the entrypoint cannot be found or called, raises, or returns something else than named
                programs; or a program cannot be traced, lowered or exported.
        """
        if request.platform not in _PLATFORMS:
            raise BadInputError(
                f"the jax frontend lowers for {' or '.join(_PLATFORMS)}, not for {request.platform!r}: "
                "choose a backend that compiles JAX programs",
                reason="unknown-platform",
            )
        # Lowering needs no device, and must not take hold of one that a trainer wants, whatever its environment says.
        os.environ["JAX_PLATFORMS"] = "cpu"
        entrypoint = Entrypoint(request)
        with entrypoint.import_path():
            programs = _named_programs(entrypoint, entrypoint.call())
            return [_kernel_graph(entrypoint, name, program, request.platform) for name, program in programs.items()]


def _named_programs(entrypoint: Entrypoint, returned: Any) -> dict[str, Program]:
    programs: dict[str, Program] = {}
    for name, program in _pairs(entrypoint, returned):
        check_program_name(entrypoint.text, name)
        if name in programs:
            raise BadInputError(f"{entrypoint.text} returned two programs named {name}", reason="duplicate-program")
        if not isinstance(program, Program):
            raise BadInputError(
                f"{entrypoint.text} returned {name} as {type(program).__name__}: make it a graphkiln.Program",
                reason="not-a-program",
            )
        programs[name] = program
    if not programs:
        raise BadInputError(f"{entrypoint.text} returned no programs", reason="no-programs")
    return programs


def _pairs(entrypoint: Entrypoint, returned: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(returned, Mapping):
        return returned.items()
    if isinstance(returned, Iterable) and not isinstance(returned, str | bytes):
        # A generator runs the user's code only here.
        pairs = entrypoint.guard("reading what it returned", lambda: list(returned))
        if all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            return pairs
    raise BadInputError(
        f"{entrypoint.text} returned {type(returned).__name__}: return a mapping from name to graphkiln.Program",
        reason="not-a-mapping",
    )


def _kernel_graph(entrypoint: Entrypoint, name: str, program: Program, platform: str) -> KernelGraph:
    ranks = _checked_ranks(name, program)
    _check_fields(name, program)
    payload = entrypoint.guard(f"program {name}", lambda: _payload(name, program, platform))
    return KernelGraph(name=name, payload=payload, payload_format=PAYLOAD_FORMAT, ranks=ranks)


def _checked_ranks(name: str, program: Program) -> RankSet:
    try:
        ranks = RankSet.of(program.ranks)
    except (TypeError, ValueError) as error:
        raise BadInputError(f"program {name}: its ranks are wrong: {error}", reason="bad-ranks") from error
    if not ranks:
        raise BadInputError(f"program {name}: no rank runs it: name one, or leave the program out", reason="bad-ranks")
    return ranks


def _check_fields(name: str, program: Program) -> None:
    import jax

    lowered = isinstance(program.function, jax.stages.Traced | jax.stages.Lowered)
    # A Traced may look Wrapped, hence the order.
    jitted = not lowered and isinstance(program.function, jax.stages.Wrapped)
    if not lowered and not callable(program.function):
        raise _bad_program(name, f"its function is of type {type(program.function).__name__}, which cannot be called")
    if not isinstance(program.arguments, tuple):
        raise _bad_program(name, f"its arguments are of type {type(program.arguments).__name__}: make them a tuple")
    if lowered and program.arguments:
        raise _bad_program(name, "it is traced already and knows its arguments: leave `arguments` unset")
    if (lowered or jitted) and (program.donate or program.out_shardings is not None):
        raise _bad_program(name, "its function is jitted already: give `donate` and `out_shardings` to jax.jit")
    if not isinstance(program.donate, tuple) or any(type(position) is not int for position in program.donate):
        raise _bad_program(name, f"donate is {program.donate!r}: make it a tuple of positions")
    for position in program.donate:
        if not 0 <= position < len(program.arguments):
            raise _bad_program(name, f"it donates argument {position} of {len(program.arguments)}")


def _bad_program(name: str, what: str) -> BadInputError:
    return BadInputError(f"program {name}: {what}", reason="bad-program")


def _payload(name: str, program: Program, platform: str) -> bytes:
    import jax
    from jax import export

    # The compiler that reads it is the one installed here, so that nothing older has to understand it.
    jax.config.update("jax_export_ignore_forward_compatibility", True)  # noqa: FBT003
    stage = _stage(program)
    _refuse_effects(name, stage)
    source = _StrippedSource(name, stage)
    exported = export.export(source, platforms=(platform,))()
    if tuple(exported.platforms) != (platform,):
        raise _bad_program(
            name,
            f"it is lowered for {', '.join(exported.platforms)} and the target wants {platform}: give a function or "
            f"a Traced, or lower it with lowering_platforms=({platform!r},)",
        )
    contract = _contract(name, exported, source.lowered)
    # The trees are in the contract: a process without the network's Python could not read all of them.
    flat = replace(
        exported,
        in_tree=jax.tree_util.tree_structure(((0,) * len(exported.in_avals), {})),
        out_tree=jax.tree_util.tree_structure((0,) * len(exported.out_avals)),
    )
    return encode_payload(contract, bytes(flat.serialize()))


def _stage(program: Program) -> Any:
    """Return the `jax.stages.Traced` or `Lowered` of a program."""
    import jax

    function = program.function
    if isinstance(function, jax.stages.Traced | jax.stages.Lowered):
        return function
    if not isinstance(function, jax.stages.Wrapped):
        options = {} if program.out_shardings is None else {"out_shardings": program.out_shardings}
        function = jax.jit(function, donate_argnums=program.donate, **options)
    return function.trace(*program.arguments)


def _refuse_effects(name: str, stage: Any) -> None:
    effects = getattr(getattr(stage, "jaxpr", None), "effects", ())
    if effects:
        shown = ", ".join(sorted(str(effect) for effect in effects))
        raise _bad_program(
            name,
            f"it has side effects ({shown}), which need its Python at run time: remove debug prints and callbacks",
        )


class _StrippedSource:
    """What `jax.export.export` takes for a jitted function, out of a stage that is traced or lowered already.

    It gives out the module without what differs between two lowerings of one program.

    Attributes:
        lowered: the lowered program, once exported.
    """

    fun_name = MODULE_NAME

    def __init__(self, name: str, stage: Any) -> None:
        self.lowered: Any = None
        self.jaxpr = getattr(stage, "jaxpr", None)
        self._name = name
        self._stage = stage

    def trace(self) -> "_StrippedSource":
        """Return itself: it is traced."""
        return self

    def lower(self, **options: Any) -> Any:
        """Return the lowered program, its module stripped."""
        self.lowered = self._stage.lower(**options) if hasattr(self._stage, "lower") else self._stage
        _refuse_what_export_drops(self._name, self.lowered)
        strip_module(self.lowered.compiler_ir("stablehlo"))
        return self.lowered

    def eval_shape(self) -> Any:
        """Return the shapes of the result."""
        return self.lowered.out_info

    def __call__(self) -> Any:
        raise TypeError("this program is only lowered, never run")


def _refuse_what_export_drops(name: str, lowered: Any) -> None:
    from jax.extend.mlir import ir

    # No public attribute tells of these two, and an export goes on without them.
    lowering = getattr(lowered, "_lowering", None)
    if getattr(lowering, "_compiler_options_kvs", ()):
        raise _bad_program(name, "its jax.jit has compiler_options: move them to the target's compiler_options")
    if getattr(lowering, "const_args", ()):
        raise _bad_program(
            name, "it is a Lowered whose captured arrays are hidden arguments: give the Traced or the function instead"
        )
    main = ir.SymbolTable(lowered.compiler_ir("stablehlo").operation)["main"]
    for attributes in (*main.arg_attrs, *main.result_attrs):
        if any(attribute.name == "mhlo.layout_mode" for attribute in attributes):
            raise _bad_program(name, "it asks for layouts of its own: only the default layouts are supported")


def _contract(name: str, exported: Any, lowered: Any) -> CallContract:
    import jax

    if exported.ordered_effects or exported.unordered_effects:
        raise _bad_program(name, "it has side effects, which need its Python at run time: remove them")
    arguments = jax.tree_util.tree_leaves(lowered.args_info)
    try:
        return CallContract(
            platform=exported.platforms[0],
            devices=exported.nr_devices,
            arguments=encode_tree(exported.in_tree),
            results=encode_tree(exported.out_tree),
            argument_types=tuple(encode_type(aval) for aval in exported.in_avals),
            result_types=tuple(encode_type(aval) for aval in exported.out_avals),
            kept=tuple(exported.module_kept_var_idx),
            donated=tuple(position for position, argument in enumerate(arguments) if argument.donated),
        )
    except UnsupportedTypeError as error:
        raise BadInputError(f"program {name}: {error}", reason="unsupported-type") from error
