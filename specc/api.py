"""The public functions: everything the command line does is one call of these."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specc import methods
from specc.benchmark import BenchOptions, BenchReport, run_bench
from specc.build import PASS_NAMES, StepBuilder, Target, choose, make_drafter, make_target
from specc.checking import PROBE_TOKENS, Report, check_pair
from specc.contracts import ACCEPT_RULES, AcceptRule, DrafterBundle, DraftsTree, Method
from specc.errors import InputError, UnknownNameError, UnsupportedError
from specc.files import read_path, writing
from specc.loading import load
from specc.models.cache import CacheReport, report_cache
from specc.models.load import LoadedModel, load_target
from specc.pairing import default_block, find_drafter, reasons_against
from specc.prompts import built_in_prompts, read_prompts
from specc.runtime import bitwise
from specc.runtime.compiled import Compiled
from specc.runtime.engine import Engine
from specc.runtime.generation import Generation
from specc.runtime.inspection import Inspection
from specc.runtime.verdict import VerifyReport, verify_text
from specc.step import Shape
from specc.training.run import TrainOptions, TrainReport, train_drafter
from specc.training.terms import LossOptions

logger = logging.getLogger(__name__)

__all__ = [
    "BenchReport", "Compiled", "Generation", "Inspection", "LossOptions", "Report", "TrainReport", "bench",
    "cache", "check", "compile", "inspect", "train",
]  # fmt: skip

DEFAULT_MAX_LENGTH = 4096  # design.md 4: the model's limit, but no more than this unless asked
FEED_ROWS = 64  # prompt rows per filling step; a whole number of them fits every prompt
MAX_BLOCK = 64  # a longer block never pays: acceptance falls geometrically


@dataclass(frozen=True)
class CompileOptions:
    """What `compile` was asked for, checked once."""

    block: int | None
    batch: int
    max_length: int | None
    accept: AcceptRule
    backend: str
    disable_passes: tuple[str, ...] = ()
    dump: Path | None = None
    exact: str | None = None

    def __post_init__(self) -> None:
        _whole("batch", self.batch, 1, 1024)
        if self.block is not None:
            _whole("block", self.block, 0, MAX_BLOCK)
        if self.max_length is not None:
            _whole("max_length", self.max_length, 2, 1 << 24)
        if self.accept not in ACCEPT_RULES:
            raise UnknownNameError("accept rule", self.accept, ACCEPT_RULES)
        if self.exact not in (None, "bitwise"):
            raise UnknownNameError("exactness", self.exact, ("bitwise",))


@dataclass(frozen=True)
class Prepared:
    """A loaded and traced target, for several `compile` calls that share one trace and one set of weights."""

    loaded: LoadedModel
    target: Target


def prepare(
    model: nn.Module | str | Path | LoadedModel,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
) -> Prepared:
    """Load and trace a target once; `compile` takes the result as its model."""
    loaded = model if isinstance(model, LoadedModel) else load_target(model, dtype=dtype, device=device)
    return Prepared(loaded, make_target(loaded.module, loaded.info))


def compile(
    model: nn.Module | str | Path | LoadedModel | Prepared,
    drafter: nn.Module | str | Path | DrafterBundle | None = None,
    *,
    method: str | Method = "dspark",
    block: int | str | None = None,
    batch: int = 1,
    max_length: int | None = None,
    accept: AcceptRule = "ratio",
    exact: str | None = None,
    weights: str | None = None,
    backend: str = "auto",
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    disable_passes: Sequence[str] = (),
    dump: Path | str | None = None,
) -> Compiled:
    """Compile a target and a drafting method into one step; the result is a drop-in for ``model.generate``.

    Args:
        model: a transformers causal LM, a folder, a ``.gguf`` file, a hub id, or a built-in name (``smollm2-135m``).
        drafter: what ``method`` drafts with: a model for ``draft_model``, else a checkpoint folder. None suits
            ``plain``, ``ngram`` and ``mtp``; for the rest a drafter registered for this target is looked up.
        method: a name in `specc.methods.METHODS`, or a `Method` of your own.
        block: draft tokens per step, 0 for plain decoding; None = the method's default.
        batch: sequences that run at once.
        max_length: most tokens of a sequence, prompt included; None = the model's limit, at most 4096.
        accept: "ratio" accepts most; "coupled" gives the sampled text of plain decoding with the same seed.
        exact: "bitwise" gives plain and speculative steps of one ``block`` the same rows, so that greedy text is equal
            bit for bit in any dtype. Every step then carries prompt rows too, read or not, and prompts are read in
            smaller chunks; a self-test at compile refuses it where a row's bits still depend on its place. Method
            ``plain`` then needs ``block``: the one of the object that it is to equal.
        weights: None; other weight formats are refused for now.
        backend: "auto", "inductor", "native" or "eager".
        device, dtype: None = the model's own.
        disable_passes: names of passes to leave out, to bisect a fault.
        dump: a folder for every graph as text.

    Raises:
        InputError, UnknownNameError, UnsupportedError, ArtifactError: before anything is traced.
    """
    if isinstance(block, str):
        raise UnsupportedError(
            f"block={block!r}", ["the block cannot adapt at run time yet"], "Give a whole number."
        )
    if weights is not None:
        raise UnsupportedError(f"weights={weights!r}", ["it is not implemented yet"], "Leave weights out.")
    chosen = resolve_method(method)
    if dump is not None and not isinstance(dump, str | Path):
        raise InputError("dump", dump, "a folder's path")
    if isinstance(disable_passes, str) or not isinstance(disable_passes, Sequence):
        raise InputError("disable_passes", disable_passes, "a list of passes' names")
    dumped = read_path("dump", dump) if dump is not None else None
    if dumped is not None:
        with writing("dump", dumped):
            dumped.mkdir(parents=True, exist_ok=True)
    for name in disable_passes:
        if name not in PASS_NAMES:
            raise UnknownNameError("pass", name, PASS_NAMES)
    options = CompileOptions(block, batch, max_length, accept, backend, tuple(disable_passes), dumped, exact)
    if exact and chosen.name == "plain" and block is None:
        raise InputError(
            "block", None, "with exact='bitwise', plain needs the block of the object that it is to equal"
        )
    if exact and isinstance(chosen, DraftsTree):
        raise UnsupportedError(
            f"exact={exact!r} with method {chosen.name!r}",
            ["a tree's rows see what no row of plain decoding does, so bits may differ"],
            "Leave exact out, or take a method that drafts a chain.",
        )
    if isinstance(model, Prepared):
        target = model.loaded
    else:
        target = model if isinstance(model, LoadedModel) else load_target(model, dtype=dtype, device=device)
    place = next(target.module.parameters()).device
    runner, why = choose(backend, place)
    logger.info("backend %s (%s)", runner.name, why)
    bundle = find_drafter(chosen, target, drafter)
    info = bundle.info if bundle is not None else None
    length = default_block(chosen, info) if options.block is None else options.block
    # Plain decoding drafts nothing, but with exact="bitwise" it runs as many rows as the block has.
    drafts = 0 if exact and chosen.name == "plain" else length
    reasons = reasons_against(chosen, target.info, info, drafts) if length or chosen.name == "plain" else ()
    if reasons:
        raise UnsupportedError(f"method {chosen.name!r} cannot run this pair", reasons)
    capacity = _capacity(options.max_length, target)
    ready = model.target if isinstance(model, Prepared) else make_target(target.module, target.info)
    builder = StepBuilder(
        ready,
        chosen,
        make_drafter(bundle) if bundle is not None else None,
        Shape(batch, capacity, target.info.vocab, switch_length(target)),
        options.disable_passes,
        options.dump,
    )
    builder.tree(length)  # the trace may find a window that the configuration does not name
    engine = Engine(builder, runner, min(bitwise.FEED_ROWS if exact else FEED_ROWS, capacity))
    if exact:
        bitwise.check_bitwise(engine, length)
    return Compiled(
        engine,
        chosen,
        length,
        accept,
        info=target.info,
        tokenizer=target.tokenizer,
        generation=target.generation,
        exact="bitwise" if exact else None,
    )


def inspect(
    model: nn.Module | str | Path | LoadedModel,
    drafter: Any = None,
    *,
    method: str | Method = "dspark",
    **options: Any,
) -> Inspection:
    """Describe the step that `compile` would make; nothing is compiled. Takes `compile`'s arguments."""
    options.setdefault("backend", "eager")
    return compile(model, drafter, method=method, **options).inspect()


def check(
    model: nn.Module | str | Path | LoadedModel,
    drafter: Any = None,
    *,
    method: str | Method = "dspark",
    prompts: str | Path | Sequence[Any] | None = None,
    block: int | None = None,
    probe: bool = True,
    max_new_tokens: int = PROBE_TOKENS,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
) -> Report:
    """Say at once everything that will not work with a pair, or will work and silently accept less; raises nothing.

    Args:
        model, drafter, method, block, device, dtype: as `compile` takes them.
        prompts: what the live probe goes on from: a JSON-lines file, messages or token ids; None = a few built in, or
            written by the target itself where it has no chat template.
        probe: whether to measure acceptance, as it is and with the taps one layer earlier and later.
        max_new_tokens: of each answer that the probe drafts along.
    """
    return check_pair(
        compile,
        prepare,
        resolve_method,
        model,
        drafter,
        method=method,
        prompts=prompts,
        block=block,
        live=probe,
        tokens=max_new_tokens,
        device=device,
        dtype=dtype,
    )


def bench(
    model: nn.Module | str | Path | LoadedModel,
    drafter: Any = None,
    *,
    methods: Sequence[str | Method] = ("plain", "ngram", "transformers"),
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    **options: Any,
) -> BenchReport:
    """Measure methods, and transformers' own ways of generating, in interleaved rounds of one process.

    Args:
        model, device, dtype: as `compile` takes them.
        drafter: of the one method that needs one, or a mapping from methods to drafters.
        methods: names of methods, `Method` objects, and ``transformers``, ``transformers-static`` (static cache),
            ``transformers-compiled`` (the same, compiled), ``assisted`` (with the draft_model drafter),
            ``prompt_lookup``. Ratios are to ``plain`` and ``transformers``, where they are among them.
        **options: block, blocks (several, to compare), prompts (a JSON-lines file or a folder of them, messages or
            ids), each (prompts used of every category), repeats,
            max_new_tokens, temperature, seed, accept, backend, max_length, plot (a folder for charts), command.

    Raises:
        InputError, UnknownNameError, UnsupportedError, ArtifactError: before anything is measured.
    """
    known = {field.name for field in fields(BenchOptions)} - {"methods"}
    for name in options:
        if name not in known:
            raise UnknownNameError("argument", name, sorted(known))
    asked = BenchOptions(methods=tuple(methods), **options)
    return run_bench(compile, prepare, resolve_method, model, drafter, asked, device=device, dtype=dtype)


def train(
    model: nn.Module | str | Path | LoadedModel,
    *,
    method: str,
    output: str | Path,
    backend: str = "auto",
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> TrainReport:
    """Train a drafter for a model from nothing but the model, and write it where `compile` can read it.

    The model writes prompts and answers them, its states are kept in the cache folder, and the drafter learns from
    those. Under ``torchrun`` every process takes a share of each batch.

    Args:
        model, backend, device, dtype: as `compile` takes them; ``backend`` is for making data.
        method: dspark, eagle3, dflash or dflash2.
        output: the drafter's folder, in the speculators layout; a run's state is kept inside it.
        say: takes lines of progress; None = the log.
        **options: see `specc.training.run.TrainOptions`: prompts, tokens, minutes, steps, draft_vocab, layers, block,
            markov_rank, taps, start, resume, avoid, batch, rate, seed, ... An end, ``minutes`` or ``steps``, is needed.

    Raises:
        InputError, UnknownNameError, UnsupportedError, ArtifactError: before any work is done.
    """
    known = {field.name for field in fields(TrainOptions)} - {"method", "output"}
    for name in options:
        if name not in known:
            raise UnknownNameError("argument", name, sorted(known))
    asked = TrainOptions(method=method, output=output, **options)
    target = model if isinstance(model, LoadedModel) else load_target(model, dtype=dtype, device=device)
    runner, why = choose(backend, next(target.module.parameters()).device)
    logger.info("backend %s (%s)", runner.name, why)
    return train_drafter(target, runner, asked, say or logger.info)


def cache(*, clear: bool = False) -> CacheReport:
    """Return what specc keeps between runs, with sizes; ``clear`` deletes everything in its cache folder first."""
    return report_cache(clear=clear)


def verify(
    model: nn.Module | str | Path | LoadedModel | Compiled,
    prompts: str | Path | Sequence[Any] | None = None,
    *,
    drafter: Any = None,
    method: str | Method = "dspark",
    max_new_tokens: int = 64,
    original: Any = None,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> VerifyReport:
    """Run prompts with and without speculation and judge every first difference: a tie by rounding, or a bug.

    Args:
        model: a compiled object, a ``.specc`` package, or what `compile` takes.
        prompts: a JSON-lines file or a folder of them, messages or token ids; None = a few built in, for which a
            tokenizer is needed.
        drafter, method, **options: as `compile` takes them, where ``model`` is not compiled yet.
        max_new_tokens: of each prompt.
        original: for what is compiled already, a package above all: the model that it must have the weights and the
            text of. With ``drafter``, the drafter's weights are compared, too.
        settings: of generation; text stays greedy.
    """
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise InputError("max_new_tokens", max_new_tokens, "a whole number, 1 or more")
    if isinstance(model, Compiled) or str(model).endswith(".specc"):
        if (drafter is not None and original is None) or set(options) - {"device", "backend"}:
            raise InputError("drafter", drafter, "nothing that compile takes: the model is compiled already")
        compiled = model if isinstance(model, Compiled) else load(str(model), **options)
    elif original is not None:
        raise InputError("original", original, "left out: the model given is the original")
    else:
        compiled = compile(model, drafter, method=method, **options)
    read = built_in_prompts() if prompts is None else read_prompts(prompts)
    ids = [prompt.encode(compiled.tokenizer) for prompt in read]
    first = None if original is None else _original(compiled, original, drafter)
    return verify_text(compiled, ids, max_new_tokens=max_new_tokens, original=first, **(settings or {}))


def _original(compiled: Compiled, model: Any, drafter: Any) -> Compiled:
    """Compile the original of what is compiled already, on the reference backend and in the same sizes."""
    source = compiled.engine.builder
    dtype = next(
        t.dtype for n, t in source.weights.items() if n.startswith("target.") and t.is_floating_point()
    )
    return compile(
        model,
        drafter,
        method="plain" if drafter is None else compiled.method.name,
        block=None if drafter is None else compiled.block,
        batch=compiled.batch,
        max_length=compiled.max_length,
        backend="eager",
        device=source.device,
        dtype=dtype,
    )


def resolve_method(method: str | Method) -> Method:
    """Return the method that a name stands for, or the given one if it keeps the protocol."""
    if isinstance(method, str):
        return methods.get(method)
    given: object = method
    if not isinstance(given, Method):
        wanted = "a method's name or an object with contracts.Method's members"
        raise InputError("method", type(given).__name__, wanted)
    return method


def switch_length(target: LoadedModel) -> int | None:
    """Return the length beyond which a longrope model uses other frequencies at every position, if it has one."""
    rope: Mapping[str, Any] = target.info.config.get("rope_parameters") or {}
    if rope.get("rope_type") != "longrope":
        return None
    return int(rope["original_max_position_embeddings"])


def _capacity(max_length: int | None, target: LoadedModel) -> int:
    limit = target.info.max_position
    if max_length is None:
        chosen = min(limit, DEFAULT_MAX_LENGTH)
        logger.info("max_length %d (the model's limit is %d)", chosen, limit)
        return chosen
    if max_length > limit:
        raise InputError("max_length", max_length, f"at most {limit}, the positions this model has")
    return max_length


def _whole(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InputError(name, value, f"a whole number from {least} to {most}")
