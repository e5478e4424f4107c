"""The tokenizer of a package: the tokenizers library and a chat template, without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import torch

from specc.artifact.fields import Fields, write_json
from specc.errors import ArtifactError, InputError, UnsupportedError

TOKENIZER, CONFIG = "tokenizer/tokenizer.json", "tokenizer/config.json"
MAX_BYTES = 256 << 20
_SAMPLE = "The quick brown fox: 12 jumps!\n\tÜber naïve café, 日本 don't  stop."
_CLEAN = ((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
          (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"))  # fmt: skip


class PackageTokenizer:
    """Encodes, decodes and applies the chat template as the tokenizer that was saved did.

    Attributes:
        inner: the `tokenizers.Tokenizer`.
        chat_template: the template, or templates by name, or None.
        special_tokens: special tokens by their names, such as ``eos_token``, as templates see them.
    """

    def __init__(
        self,
        inner: Any,
        *,
        chat_template: str | Mapping[str, str] | None = None,
        special_tokens: Mapping[str, Any] | None = None,
        cleans_spaces: bool = False,
    ) -> None:
        self.inner, self.chat_template, self.cleans_spaces = inner, chat_template, cleans_spaces
        self.special_tokens = dict(special_tokens or {})

    def __len__(self) -> int:
        return int(self.inner.get_vocab_size(with_added_tokens=True))

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        return_tensors: str | None = None,
        padding: bool = False,
    ) -> dict[str, Any]:
        """Encode a text or several: ``input_ids`` and ``attention_mask``, lists, or tensors with "pt"."""
        texts = [text] if isinstance(text, str) else list(text)
        rows = [list(self.inner.encode(t, add_special_tokens=add_special_tokens).ids) for t in texts]
        longest = max(map(len, rows), default=0) if padding else 0
        fill = self.pad_token_id if self.pad_token_id is not None else 0
        mask = [[0] * (longest - len(r)) + [1] * len(r) for r in rows]
        rows = [[fill] * (longest - len(r)) + r for r in rows]
        if return_tensors is None:
            single = isinstance(text, str)
            return {"input_ids": rows[0] if single else rows, "attention_mask": mask[0] if single else mask}
        if return_tensors != "pt" or len({len(r) for r in rows}) > 1:
            raise InputError("return_tensors", return_tensors, "'pt', with padding=True where lengths differ")
        return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids: a list, or a tensor of one dimension."""
        ids = token_ids.tolist() if isinstance(token_ids, torch.Tensor) else token_ids
        ids = [ids] if isinstance(ids, int) else list(ids)
        text = str(self.inner.decode(ids, skip_special_tokens=skip_special_tokens))
        if self.cleans_spaces:
            for old, new in _CLEAN:
                text = text.replace(old, new)
        return text

    def batch_decode(self, sequences: Any, *, skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in sequences]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        return (
            self.inner.id_to_token(ids) if isinstance(ids, int) else [self.inner.id_to_token(i) for i in ids]
        )

    def _special(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.inner.token_to_id(token)

    @property
    def eos_token_id(self) -> int | None:
        return self._special("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._special("bos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._special("pad_token")

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        return_tensors: str | None = None,
        tools: Any = None,
        documents: Any = None,
        chat_template: str | None = None,
        **given: Any,
    ) -> Any:
        """Return messages as the template writes them: text, or ids with ``tokenize``."""
        template = self._template(chat_template, tools)
        text = render_chat(
            template,
            messages=[dict(m) for m in conversation],
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens, **given},
        )
        if not tokenize:
            return text
        encoded = self(text, add_special_tokens=False, return_tensors=return_tensors)
        return encoded if return_dict else encoded["input_ids"]

    def _template(self, chosen: str | None, tools: Any) -> str:
        templates = self.chat_template
        if isinstance(templates, Mapping):
            name = chosen or ("tool_use" if tools is not None and "tool_use" in templates else "default")
            if name in templates:
                return templates[name]
        elif chosen is not None:
            return chosen
        elif templates is not None:
            return templates
        raise InputError("chat_template", chosen, "the tokenizer has no such chat template")


def render_chat(template: str, **given: Any) -> str:
    """Run a chat template in jinja's sandbox, with the functions that transformers offers to it.

    Raises:
        InputError: the template refuses the messages, or is wrong itself.
        UnsupportedError: the installed jinja2 cannot run foreign templates safely.
    """
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    version = tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdigit())
    if version < (3, 1, 6):
        raise UnsupportedError(
            "the chat template cannot be run",
            [f"jinja2 {jinja2.__version__} has holes in its sandbox"],
            "Install jinja2 3.1.6 or newer.",
        )

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_block()]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda text: datetime.now().astimezone().strftime(text)
    try:
        return environment.from_string(template).render(**given)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise InputError(
            "messages", f"{type(error).__name__}: {error}", "what the chat template takes"
        ) from error


def _generation_block() -> type:
    """Return the extension for ``{% generation %}``: a mark for training that changes nothing."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class GenerationBlock(Extension):
        tags = {"generation"}  # noqa: RUF012  jinja's own attribute

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationBlock


def write_tokenizer(tokenizer: Any) -> dict[str, bytes]:
    """Return a tokenizer's files by their names in a package.

    Args:
        tokenizer: a `PackageTokenizer`, or one of transformers' that the tokenizers library backs.

    Raises:
        UnsupportedError: no such library backs it, or the written one does not do the same.
    """
    inner = (
        tokenizer.inner
        if isinstance(tokenizer, PackageTokenizer)
        else getattr(tokenizer, "backend_tokenizer", None)
    )
    if inner is None:
        raise UnsupportedError(
            "a package cannot hold this tokenizer",
            [f"{type(tokenizer).__name__} is not backed by the tokenizers library"],
            "Set compiled.tokenizer to a fast tokenizer, or to None.",
        )
    content = json.loads(inner.to_str())
    content["truncation"] = content["padding"] = None  # they are the last call's
    config = _config(tokenizer)
    files = {TOKENIZER: write_json(content), CONFIG: write_json(config)}
    differences = _differences(tokenizer, _make(files[TOKENIZER], config))
    if differences:
        raise UnsupportedError("a package cannot hold this tokenizer", differences)
    return files


def _config(tokenizer: Any) -> dict[str, Any]:
    if isinstance(tokenizer, PackageTokenizer):
        specials, cleans = tokenizer.special_tokens, tokenizer.cleans_spaces
    else:
        specials = {n: _token(v) for n, v in tokenizer.special_tokens_map.items()}
        forced = getattr(
            tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False
        )
        is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
        cleans = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False)) and (forced or not is_bpe)
    return {
        "chat_template": tokenizer.chat_template,
        "special_tokens": specials,
        "cleans_spaces": bool(cleans),
    }


def _token(value: Any) -> Any:
    return [_token(v) for v in value] if isinstance(value, list | tuple) else str(value)


def _make(content: bytes, config: Mapping[str, Any]) -> PackageTokenizer:
    from tokenizers import Tokenizer

    return PackageTokenizer(Tokenizer.from_str(content.decode("utf-8")), **config)


def _differences(one: Any, other: PackageTokenizer) -> list[str]:
    """Return where the written tokenizer differs on samples: custom Python code does not travel."""
    found = []
    sample = other.inner.decode(list(range(min(len(other), 64)))) + _SAMPLE
    for special in (True, False):
        ids = one(sample, add_special_tokens=special)["input_ids"]
        if ids != other(sample, add_special_tokens=special)["input_ids"]:
            found.append(f"{type(one).__name__} encodes otherwise than its tokenizers.Tokenizer")
        texts = [[t.decode(ids, skip_special_tokens=skip) for skip in (True, False)] for t in (one, other)]
        if texts[0] != texts[1]:
            found.append(f"{type(one).__name__} decodes otherwise than its tokenizers.Tokenizer")
    if other.chat_template:
        turns = [{"role": "user", "content": "Hello there."}]
        said = []
        for item in (one, other):
            try:
                said.append(item.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
            except Exception:
                # A template may refuse this conversation in its own words; both must then refuse.
                said.append("refused")
        if said[0] != said[1]:
            found.append("its chat template gives another text without transformers")
    return found


def read_tokenizer(path: Path, content: memoryview, fields: Fields) -> PackageTokenizer:
    """Return the tokenizer of a package.

    Raises:
        ArtifactError: its files are wrong.
    """
    if len(content) > MAX_BYTES:
        raise ArtifactError(path, TOKENIZER, f"{len(content)} bytes", f"at most {MAX_BYTES}")
    template: str | Mapping[str, str] | None = None
    if fields.optional("chat_template"):
        value = fields.take("chat_template")
        values = value.values() if isinstance(value, dict) else [value]
        if not all(isinstance(v, str) for v in values):
            raise fields.fault("chat_template", type(value).__name__, "a text, or texts by name")
        template = value
    specials = fields.mapping("special_tokens")
    for name, token in specials.items():
        if not isinstance(token, str) and not (
            isinstance(token, list) and all(isinstance(t, str) for t in token)
        ):
            raise fields.fault(f"special_tokens.{name}", repr(token)[:200], "a token or a list of tokens")
    cleans = fields.flag("cleans_spaces")
    fields.done()
    config = {"chat_template": template, "special_tokens": specials, "cleans_spaces": cleans}
    try:
        return _make(bytes(content), config)
    except Exception as error:
        # The tokenizers library raises plain exceptions for files that it cannot read.
        raise ArtifactError(path, TOKENIZER, f"{error}"[:300], "a file of the tokenizers library") from error
