"""The command line: what it passes on, what it prints where, how it fails, how fast it answers."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import specc
from specc import cli
from specc.cli import console
from specc.errors import UnknownNameError, UnsupportedError

HELP_SECONDS = 1.0


class Record:
    """A report or statistics: a record that can be written out."""

    def __init__(self, **values: Any) -> None:
        self._values = values

    def to_dict(self) -> dict[str, Any]:
        return self._values

    def render(self, stage: str | None = None) -> str:
        return f"graph of {stage}"


class Tokenizer:
    """A byte tokenizer: ids are UTF-8 bytes, so one character can be several tokens."""

    chat_template = "yes"

    def __call__(self, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([list(text.encode())])}

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> dict[str, torch.Tensor]:
        assert options == {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        return self(f"<{messages[0]['role']}>{messages[0]['content']}", "pt")

    def decode(self, ids: Any, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(int(i) for i in ids).decode(errors="replace")


class FakeCompiled:
    """What `specc.compile` returns, as far as the command line looks at it."""

    block, max_length, info = 3, 64, types.SimpleNamespace(dtype=torch.float32)
    method = types.SimpleNamespace(name="ngram")
    answer = "Paris ist schön 🎉."

    def __init__(self, calls: list[tuple[str, Any]]) -> None:
        self.calls, self.tokenizer = calls, Tokenizer()

    def check_request(self, **arguments: Any) -> None:
        assert "input_ids" in arguments

    def warm_up(self, **settings: Any) -> list[str]:
        self.calls.append(("warm_up", settings))
        return []

    def generate(self, **arguments: Any) -> Any:
        self.calls.append(("generate", arguments))
        prompt, streamer = arguments["input_ids"], arguments["streamer"]
        answer = torch.tensor([list(self.answer.encode())])
        if streamer:
            streamer.put(prompt[0])
            for piece in answer[0].split(2):  # cuts characters in two
                streamer.put(piece)
            streamer.end()
        sequences = torch.cat([prompt, answer], dim=1)
        return types.SimpleNamespace(
            sequences=sequences, finish_reasons=["stop"], stats=Record(steps=4, ms=1.5)
        )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Replace `specc.api` by a recorder and return what it was asked."""
    made: list[tuple[str, Any]] = []

    def answer(name: str, result: Callable[[], Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            made.append((name, (arguments, options)))
            if options.get("method") == "ngrm":
                raise UnknownNameError("method", "ngrm", ["ngram", "plain"])
            return result()

        return call

    verdict = {"works": True, "clean": False}
    rows = [{"method": "plain", "ms_per_step": 2.0}, {"method": "ngram", "ms_per_step": 2.5}]
    fake = types.SimpleNamespace(
        compile=answer("compile", lambda: FakeCompiled(made)),
        inspect=answer("inspect", lambda: Record(nodes=1234, passes=[{"name": "drop_noops", "after": 7}])),
        bench=answer("bench", lambda: Record(device="cpu", rows=rows)),
        check=answer(
            "check", lambda: types.SimpleNamespace(**verdict, to_dict=dict, render=lambda: "the report")
        ),
        cache=answer("cache", lambda: Record(folder="/nowhere", size_bytes=0)),
    )
    monkeypatch.setitem(sys.modules, "specc.api", fake)
    monkeypatch.setattr(specc, "api", fake, raising=False)
    return made


@pytest.fixture
def invoke(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Return a caller of the command line: exit status, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["specc", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    yield run
    logging.getLogger("specc").handlers.clear()


Invoke = Callable[..., tuple[int, str, str]]
Calls = list[tuple[str, Any]]


def test_run_streams_text_to_stdout_and_the_rest_to_stderr(invoke: Invoke, calls: Calls) -> None:
    status, out, err = invoke("run", "some/model", "--prompt", "Hi", "--block", "3", "--dtype", "float32")
    assert (status, out) == (0, FakeCompiled.answer + "\n")
    assert "max_new_tokens=256" in err
    assert "block 3" in err
    assert "statistics" in err
    assert calls[0] == (
        "compile",
        (
            ("some/model", None),
            {
                "method": "dspark", "block": 3, "accept": "ratio", "backend": "auto", "dtype": "float32",
                "device": None, "max_length": None,
            },
        ),
    )  # fmt: skip
    sent = calls[2][1]
    assert bytes(sent["input_ids"][0].tolist()) == b"<user>Hi"
    assert (sent["do_sample"], sent["max_new_tokens"], sent["seed"]) == (False, 256, None)
    assert "temperature" not in sent


def test_run_without_chat_template_from_a_file(invoke: Invoke, calls: Calls, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Grüße", encoding="utf-8")
    status, _, _ = invoke("run", "m", "--prompt-file", str(tmp_path / "prompt.txt"), "--no-chat-template")
    assert status == 0
    assert bytes(calls[2][1]["input_ids"][0].tolist()).decode() == "Grüße"


def test_run_prints_one_json_object(invoke: Invoke, calls: Calls) -> None:
    status, out, _ = invoke("run", "m", "--prompt", "Hi", "--json")
    document = json.loads(out)
    assert (status, document["text"], document["finish_reason"]) == (0, FakeCompiled.answer, "stop")
    assert (document["stats"], document["options"]["method"]) == ({"steps": 4, "ms": 1.5}, "dspark")
    assert calls[2][1]["streamer"] is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--temperature", "0"], {"do_sample": False}),
        (["--temperature", "0.7"], {"do_sample": True, "temperature": 0.7}),
        (
            ["--top-k", "5", "--min-p", "0.1"],
            {"do_sample": True, "temperature": 1.0, "top_k": 5, "min_p": 0.1},
        ),
    ],
)
def test_sampling_options(
    invoke: Invoke, calls: Calls, arguments: list[str], expected: dict[str, Any]
) -> None:
    assert invoke("run", "m", "--prompt", "Hi", *arguments)[0] == 0
    names = {"do_sample", "temperature", "top_k", "top_p", "min_p"}
    assert {name: value for name, value in calls[2][1].items() if name in names} == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "m"], "exactly one of --prompt and --prompt-file; got 'neither'"),
        (["run", "m", "--prompt", "a", "--prompt-file", "b"], "got 'both'"),
        (["run", "m", "--prompt-file", "/no/such/file"], "must be a readable UTF-8 file"),
        (["run", "m", "--prompt", "a", "--temperature", "0", "--top-k", "3"], "must be above 0 with top_k"),
        (
            ["run", "m", "--prompt", "a", "--method", "ngrm"],
            "specc: unknown method 'ngrm'; did you mean 'ngram'?",
        ),
        (["run", "m", "--prompt", "a", "--block", "-1"], "--block"),
        (["bench", "m", "--repeats", "0"], "--repeats"),
        (
            ["bench", "m", "--blocks", "1,x"],
            "--blocks: whole numbers with commas between, such as 2,15,28; got '1,x'",
        ),
        (
            ["train", "m", "--method", "dspark", "--output", "o", "--taps", "2,x"],
            "--taps: whole numbers with commas",
        ),
        (
            ["bench", "m", "--drafter", "a", "--drafter", "b"],
            "--drafter: one drafter, or METHOD=PATH for each",
        ),
        (["rnu"], "run"),
    ],
)
def test_a_wrong_request_exits_2_without_a_traceback(
    invoke: Invoke, calls: Calls, arguments: list[str], message: str
) -> None:
    status, out, err = invoke(*arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_every_reason_and_note_is_printed(
    invoke: Invoke, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        error = UnsupportedError("method 'x' cannot run this pair", ["one", "two"])
        error.add_note("while reading the drafter")
        raise error

    monkeypatch.setattr(specc.api, "inspect", refuse)
    status, _, err = invoke("inspect", "m")
    assert status == 2
    assert err.endswith(
        "specc: method 'x' cannot run this pair:\n  - one\n  - two\n  (while reading the drafter)\n"
    )


def test_inspect_passes_on_and_prints(invoke: Invoke, calls: Calls, tmp_path: Path) -> None:
    arguments = ["--disable-pass", "drop_noops", "--disable-pass", "fuse_step", "--dump", str(tmp_path)]
    status, out, err = invoke("inspect", "m", "--stage", "verify", "--batch", "2", *arguments)
    assert status == 0
    options = calls[0][1][1]
    assert (options["batch"], options["disable_passes"]) == (2, ("drop_noops", "fuse_step"))
    assert options["dump"] == tmp_path
    assert "1,234" in out
    assert "drop_noops" in out
    assert "graph of verify" in out
    assert str(tmp_path) in err


def test_bench_splits_methods_and_tabulates_rows(invoke: Invoke, calls: Calls) -> None:
    status, out, _ = invoke("bench", "m", "--methods", "plain, ngram", "--repeats", "2")
    assert status == 0
    assert (calls[0][1][1]["methods"], calls[0][1][1]["repeats"]) == (("plain", "ngram"), 2)
    assert "ms per step" in out
    assert "2.5" in out


def test_bench_passes_on_drafters_and_blocks(invoke: Invoke, calls: Calls) -> None:
    assert invoke("bench", "m", "--drafter", "one", "--blocks", "1,4", "--temperature", "0.7")[0] == 0
    arguments, options = calls[0][1]
    assert (arguments, options["blocks"], options["temperature"]) == (("m", "one"), (1, 4), 0.7)
    assert options["command"] == "specc bench m --drafter one --blocks 1,4 --temperature 0.7"
    assert invoke("bench", "m", "--drafter", "dspark=a", "--drafter", "eagle3=b")[0] == 0
    assert calls[1][1][0] == ("m", {"dspark": "a", "eagle3": "b"})


def test_check_fails_only_on_what_it_was_asked_about(invoke: Invoke, calls: Calls) -> None:
    status, out, _ = invoke("check", "m", "d", "--method", "eagle3", "--no-probe")
    assert (status, out) == (0, "the report\n")
    arguments, options = calls[0][1]
    assert (arguments, options["method"], options["probe"]) == (("m", "d"), "eagle3", False)
    assert invoke("check", "m", "d", "--strict")[0] == 1


def test_what_takes_long_is_told_and_the_rest_on_request(
    invoke: Invoke, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def log(**_: Any) -> Record:
        logging.getLogger("specc.models.default").info("fetching")
        logging.getLogger("specc.pipeline").info("a pass")
        return Record(folder="x")

    monkeypatch.setattr(specc.api, "cache", log)
    told = invoke("cache")[2]
    assert "fetching" in told
    assert "a pass" not in told
    assert "a pass" in invoke("--verbose", "cache")[2]


@pytest.mark.parametrize("command", ["inspect", "bench"])
def test_json_is_all_of_stdout(invoke: Invoke, calls: Calls, command: str) -> None:
    status, out, _ = invoke(command, "m", "--json")
    assert (status, json.loads(out)["options"]["model"]) == (0, "m")


def test_cache(invoke: Invoke, calls: Calls) -> None:
    assert invoke("cache", "--clear")[0] == 0
    assert calls == [("cache", ((), {"clear": True}))]


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]])
def test_help_is_instant(arguments: list[str]) -> None:
    code = f"""
import sys, time
sys.argv = {["specc", *arguments]!r}
import specc.cli
try:
    specc.cli.main()
finally:
    assert not {{"torch", "transformers", "numpy"}} & set(sys.modules)
    print(time.process_time(), file=sys.stderr)
"""
    seconds = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        seconds.append(float(done.stderr))
    # Processor time, since the machine may be busy: half a second idle, more where caches are shared.
    assert min(seconds) < HELP_SECONDS


def test_help_states_every_default() -> None:
    code = "import sys; sys.argv = ['specc', 'run', '--help']; import specc.cli as c; c.main()"
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for default in ("dspark", "256", "ratio", "auto", "chat-template"):
        assert f"[default: {default}]" in text


def test_wide_records_stand_side_by_side_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"method": name, **{f"figure_{i}": 1234.5 + i for i in range(9)}} for name in ("plain", "dspark")]
    monkeypatch.setenv("COLUMNS", "80")
    console.show({"rows": rows})
    narrow = capsys.readouterr().out
    heading = next(line for line in narrow.splitlines() if "method" in line)
    assert "plain" in heading
    assert "dspark" in heading
    assert narrow.count("figure") == 9
    assert "1,242" in narrow  # not broken over lines
    monkeypatch.setenv("COLUMNS", "200")
    console.show({"rows": rows})
    assert "figure 8" in next(line for line in capsys.readouterr().out.splitlines() if "method" in line)
