"""``specc run``: answer one prompt, streaming the text to the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specc.cli import console, options, package
from specc.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


class TerminalStreamer:
    """Print text as its tokens arrive; takes transformers' streamer calls.

    Text is held back while its last character is incomplete: a character may span tokens, and a token
    decodes differently at the start of a text, so each piece is decoded together with the piece before it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._before = 0  # start of the piece printed last: context for decoding the next one
        self._printed = 0
        self._saw_prompt = False

    def put(self, value: Tensor) -> None:
        if not self._saw_prompt:
            self._saw_prompt = True
            return
        self._ids.extend(value.flatten().tolist())
        self._print(final=False)

    def end(self) -> None:
        self._print(final=True)
        sys.stdout.write("\n")
        sys.stdout.flush()

    def _print(self, *, final: bool) -> None:
        old = self._decode(self._ids[self._before : self._printed])
        new = self._decode(self._ids[self._before :])
        if len(new) <= len(old) or (new.endswith("\ufffd") and not final):
            return
        sys.stdout.write(new[len(old) :])
        sys.stdout.flush()
        self._before, self._printed = self._printed, len(self._ids)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        given = "neither" if prompt is None else "both"
        raise InputError("prompt", given, "give exactly one of --prompt and --prompt-file")
    text = prompt or ""
    try:
        if prompt_file is not None:
            text = prompt_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            "--prompt-file", str(prompt_file), f"must be a readable UTF-8 file ({error})"
        ) from None
    if not text.strip():
        raise InputError(
            "--prompt" if prompt_file is None else "--prompt-file", text, "a text that is not empty"
        )
    return text


def _sampling(temperature: float | None, **truncation: float | None) -> dict[str, float | bool]:
    """Return generate's sampling arguments: greedy unless a temperature or a truncation is given."""
    given = {name: value for name, value in truncation.items() if value is not None}
    if temperature == 0 and given:
        raise InputError("--temperature", 0, f"must be above 0 with {', '.join(given)}; 0 means greedy")
    if not temperature and not given:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": 1.0 if temperature is None else temperature, **given}


def _encode(tokenizer: Any, prompt: str, *, chat: bool) -> dict[str, Tensor]:
    if tokenizer is None:
        raise InputError("MODEL", "a model without a tokenizer", "must have a tokenizer beside its weights")
    if not chat:
        return {"input_ids": tokenizer(prompt, return_tensors="pt")["input_ids"]}
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("MODEL", "a tokenizer without a chat template", "has none: add --no-chat-template")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )["input_ids"]
    return {"input_ids": ids}


def run(
    context: typer.Context,
    model: options.Model,
    prompt: Annotated[str | None, typer.Option(help="The user's message.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the message from this file instead.")] = None,
    method: options.Method = "dspark",
    drafter: options.Drafter = None,
    block: options.Block = None,
    max_new_tokens: Annotated[int, typer.Option(help="Stop after this many tokens.")] = 256,
    temperature: Annotated[
        float | None,
        typer.Option(help="Sample at this temperature. Default: greedy; 1 with --top-k and the like."),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(help="Sample among the k most likely tokens. Default: the model's own, else 50."),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample among the likeliest tokens of this mass. Default: the model's own."),
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Drop tokens below this share of the likeliest.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all draws. Default: a fresh one.")] = None,
    accept: options.Accept = "ratio",
    dtype: options.Dtype = None,
    device: options.Device = None,
    backend: options.Backend = "auto",
    max_length: options.MaxLength = None,
    sha256: options.Sha256 = None,
    native_only: options.NativeOnly = False,
    chat_template: Annotated[bool, typer.Option(help="Wrap the prompt as a chat message.")] = True,
    json_output: options.Json = False,
) -> None:
    """Answer a prompt with speculative decoding, streaming the text.

    MODEL may be a .specc package, which brings its own drafter and method.
    Text goes to stdout, everything else to stderr.
    """
    text = _read_prompt(prompt, prompt_file)
    if max_new_tokens < 0:
        raise InputError("--max-new-tokens", max_new_tokens, "0 or more")
    sampling = _sampling(temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    console.show_options(context)

    import specc  # heavy: torch and the compiler

    if package.is_package(model):
        package.refuse_given(context, "method", "drafter", "block", "dtype", "max_length")
        compiled = specc.load(model, device=device, backend=backend, sha256=sha256, native_only=native_only)
        more: dict[str, Any] = {"accept": accept}
        sampling |= more if package.is_given(context, "accept") else {}
    else:
        if sha256 is not None or native_only:
            raise InputError("MODEL", model, "a .specc package, for --sha256 and --native-only")
        rule: Any = accept  # checked by compile
        compiled = specc.compile(
            model,
            drafter,
            method=method,
            block=block,
            accept=rule,
            backend=backend,
            dtype=dtype,
            device=device,
            max_length=max_length,
        )
    inputs = _encode(compiled.tokenizer, text, chat=chat_template)
    console.say(
        f"method {compiled.method.name}, block {compiled.block}, max length {compiled.max_length}, "
        f"{str(compiled.info.dtype).removeprefix('torch.')}, prompt {inputs['input_ids'].shape[1]} tokens"
    )
    arguments: dict[str, Any] = {**inputs, **sampling, "max_new_tokens": max_new_tokens, "seed": seed}
    compiled.check_request(**arguments)
    compiled.warm_up(**sampling)  # so that neither the text nor its statistics wait for a compiler
    result: Any = compiled.generate(
        **arguments,
        return_dict_in_generate=True,
        streamer=None if json_output else TerminalStreamer(compiled.tokenizer),
    )
    stats = result.stats.to_dict()
    if json_output:
        answer = result.sequences[0, inputs["input_ids"].shape[1] :]
        console.print_json(
            {
                "options": context.params,
                "text": compiled.tokenizer.decode(answer, skip_special_tokens=True),
                "finish_reason": result.finish_reasons[0],
                "stats": stats,
            }
        )
        return
    console.show({"finish_reason": result.finish_reasons[0], **stats}, "statistics", stderr=True)
