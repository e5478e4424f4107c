"""Loading: every family from a folder, and one typed error for everything that is wrong."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from specc.errors import ArtifactError, InputError, UnknownNameError, UnsupportedError
from specc.models import load as load_module
from specc.models.load import load_drafter_model, load_target, weights_fingerprint
from tests.tiny import ARCHS, noisy_copy, tiny_model, tiny_tokenizer

PROMPT = torch.tensor([[5, 9, 20, 7, 33]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A whole llama folder with a tokenizer; tests copy what they break."""
    path = tmp_path_factory.mktemp("whole") / "llama"
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [1, 3]
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def broken(folder, tmp_path):
    """A copy of the whole folder that a test may break."""
    path = tmp_path / "copy"
    path.mkdir()
    for file in folder.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def _edit(path, **changes):
    values = json.loads((path / "config.json").read_text())
    values.update(changes)
    (path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


def _rewrite(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("arch", ARCHS)
def test_every_family_loads_equal_to_what_was_saved(arch, tmp_path):
    model = tiny_model(arch)
    model.save_pretrained(tmp_path / arch)
    loaded = load_target(tmp_path / arch)
    assert torch.equal(loaded.module(PROMPT).logits, model(PROMPT).logits)
    assert loaded.unused == ()
    assert loaded.tokenizer is None
    assert loaded.fingerprint == weights_fingerprint(model)
    assert not loaded.module.training
    assert not any(p.requires_grad for p in loaded.module.parameters())


def test_what_a_folder_brings(folder):
    loaded = load_target(folder)
    assert loaded.path == folder
    assert loaded.info.name == "llama"
    assert loaded.info.tokenizer_vocab == len(loaded.tokenizer)
    assert loaded.generation["eos_token_id"] == [1, 3]
    assert str(folder) not in json.dumps(dict(loaded.info.config))


def test_sharded_weights_load(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    assert torch.equal(load_target(tmp_path / "shards").module(PROMPT).logits, model(PROMPT).logits)


def test_a_callers_module_is_used_as_it_is():
    model = tiny_model("llama").requires_grad_(True)
    loaded = load_target(model, tokenizer=tiny_tokenizer())
    assert loaded.module is model
    assert loaded.path is None
    assert loaded.info.tokenizer_vocab == 96
    assert all(p.requires_grad for p in model.parameters())


def test_fingerprint_sees_a_changed_weight_and_ignores_the_folder(folder):
    model = tiny_model("llama")
    before = weights_fingerprint(model)
    assert load_target(folder).fingerprint == before
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    assert weights_fingerprint(model) != before


class TestDtype:
    def test_checkpoints_dtype_unless_the_device_is_slow_in_it(self, tmp_path, monkeypatch):
        tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path / "half")
        monkeypatch.setattr(load_module, "default_dtype", lambda found, _device: found)
        assert load_target(tmp_path / "half", device="cpu").info.dtype is torch.bfloat16
        monkeypatch.setattr(load_module, "default_dtype", lambda _found, _device: torch.float32)
        loaded = load_target(tmp_path / "half", device="cpu")
        assert loaded.info.dtype is torch.float32
        assert loaded.module.lm_head.weight.dtype is torch.float32

    @pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "torch.bfloat16"])
    def test_asked_for(self, folder, dtype):
        assert load_target(folder, dtype=dtype).info.dtype is torch.bfloat16

    @pytest.mark.parametrize("dtype", ["bf17", torch.int8, 5])
    def test_wrong(self, folder, dtype):
        with pytest.raises(InputError, match="dtype"):
            load_target(folder, dtype=dtype)

    def test_a_module_is_not_converted(self):
        with pytest.raises(InputError, match="convert it"):
            load_target(tiny_model("llama"), dtype="bfloat16")

    def test_a_drafter_takes_the_targets(self, folder):
        target = load_target(tiny_model("llama").to(torch.bfloat16))
        assert load_drafter_model(folder, target=target).info.dtype is torch.bfloat16
        assert load_drafter_model(noisy_copy(target.module), target=target).info.dtype is torch.bfloat16


class TestNames:
    def test_missing_path(self, tmp_path):
        for model in (tmp_path / "no", str(tmp_path / "no"), "./no", "no.gguf"):
            with pytest.raises(InputError, match="no such file or folder"):
                load_target(model)

    def test_near_a_built_in_name(self, monkeypatch):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(UnknownNameError, match="did you mean 'smollm2-135m'"):
            load_target("smollm-135m")

    def test_hub_id_offline(self, monkeypatch):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(InputError, match="--local-dir"):
            load_target("nobody/nothing")

    @pytest.mark.parametrize("model", [None, 5, "", "  "])
    def test_not_a_model(self, model):
        with pytest.raises(InputError, match="a folder"):
            load_target(model)

    def test_a_file_that_is_not_gguf(self, folder):
        with pytest.raises(InputError, match="folder"):
            load_target(folder / "config.json")

    def test_the_argument_is_named(self, tmp_path):
        with pytest.raises(InputError, match="drafter"):
            load_drafter_model(tmp_path / "no", target=load_target(tiny_model("llama")))


class TestFiles:
    def test_no_config(self, broken):
        (broken / "config.json").unlink()
        with pytest.raises(ArtifactError, match=r"config\.json"):
            load_target(broken)

    def test_adapters_alone(self, broken):
        (broken / "config.json").rename(broken / "adapter_config.json")
        with pytest.raises(UnsupportedError, match="merge"):
            load_target(broken)

    def test_config_is_not_json(self, broken):
        (broken / "config.json").write_text("{")
        with pytest.raises(ArtifactError, match="JSON"):
            load_target(broken)

    def test_config_does_not_validate(self, broken):
        _edit(broken, num_hidden_layers="three")
        with pytest.raises(ArtifactError, match=r"config\.json"):
            load_target(broken)

    def test_unknown_family(self, broken):
        _edit(broken, model_type="lama", auto_map={"AutoModel": "x.Y"})
        with pytest.raises(UnsupportedError, match="it has 'llama'") as error:
            load_target(broken)
        assert any("auto_map" in reason for reason in error.value.reasons)

    def test_pickles_are_refused_with_the_conversion(self, broken):
        (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
        with pytest.raises(UnsupportedError, match="save_pretrained"):
            load_target(broken)

    def test_no_weights(self, broken):
        (broken / "model.safetensors").unlink()
        with pytest.raises(ArtifactError, match="no weights"):
            load_target(broken)

    @pytest.mark.parametrize("keep", [0, 5, 300, -10])
    def test_truncated(self, broken, keep):
        data = (broken / "model.safetensors").read_bytes()
        (broken / "model.safetensors").write_bytes(data[:keep])
        with pytest.raises(ArtifactError, match=r"model\.safetensors"):
            load_target(broken)

    def test_header_is_rubbish(self, broken):
        data = (broken / "model.safetensors").read_bytes()
        (broken / "model.safetensors").write_bytes(data[:8] + b"x" * 20 + data[28:])
        with pytest.raises(ArtifactError, match="header"):
            load_target(broken)

    def test_header_claims_terabytes(self, broken):
        data = (broken / "model.safetensors").read_bytes()
        (broken / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + data[8:])
        with pytest.raises(ArtifactError, match="header length"):
            load_target(broken)

    def test_missing_shard(self, tmp_path):
        tiny_model("llama").save_pretrained(tmp_path / "shards", max_shard_size="40KB")
        sorted((tmp_path / "shards").glob("*.safetensors"))[1].unlink()
        with pytest.raises(ArtifactError, match="weight_map"):
            load_target(tmp_path / "shards")

    def test_shard_outside_the_folder(self, tmp_path):
        tiny_model("llama").save_pretrained(tmp_path / "shards", max_shard_size="40KB")
        index = tmp_path / "shards" / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../other.safetensors"}}))
        with pytest.raises(ArtifactError, match="same folder"):
            load_target(tmp_path / "shards")

    def test_missing_tensor(self, broken):
        _rewrite(broken, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
        with pytest.raises(ArtifactError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
            load_target(broken)

    def test_wrong_shape(self, broken):
        _rewrite(broken, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(96, 31)}))
        with pytest.raises(ArtifactError, match="copy"):
            load_target(broken)

    def test_tensors_nobody_reads_are_kept_by_name(self, broken):
        _rewrite(broken, lambda tensors: tensors.update({"mtp.fc.weight": torch.zeros(2, 2)}))
        assert load_target(broken).unused == ("mtp.fc.weight",)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_nonfinite_weight_is_named(self, broken, value):
        def change(tensors):
            tensors["model.layers.2.self_attn.q_proj.weight"][3, 4] = value

        _rewrite(broken, change)
        with pytest.raises(ArtifactError, match=r"layers\.2\.self_attn\.q_proj\.weight: found NaN or Inf"):
            load_target(broken)

    def test_nonfinite_module(self):
        model = tiny_model("llama")
        with torch.no_grad():
            model.lm_head.weight[0, 0] = float("nan")
        with pytest.raises(ArtifactError, match="lm_head"):
            load_target(model)

    def test_broken_tokenizer(self, broken):
        (broken / "tokenizer.json").write_text("{}")
        with pytest.raises(ArtifactError, match="tokenizer"):
            load_target(broken)

    def test_float8_weights(self, broken):
        _rewrite(
            broken,
            lambda tensors: tensors.update({k: v.to(torch.float8_e4m3fn) for k, v in tensors.items()}),
        )
        with pytest.raises(UnsupportedError, match="F8_E4M3"):
            load_target(broken)

    def test_not_a_gguf(self, tmp_path):
        (tmp_path / "x.gguf").write_bytes(b"nonsense")
        with pytest.raises(ArtifactError, match="first bytes"):
            load_target(tmp_path / "x.gguf")

    def test_truncated_gguf(self, tmp_path):
        (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 1))
        with pytest.raises(ArtifactError, match=r"x\.gguf"):
            load_target(tmp_path / "x.gguf")


def test_a_family_is_refused_before_its_weights_are_read(broken):
    _edit(broken, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    (broken / "model.safetensors").unlink()
    with pytest.raises(UnsupportedError, match="dynamic"):
        load_target(broken)


def test_quantised_folder_is_refused(broken):
    _edit(broken, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    with pytest.raises(UnsupportedError, match="gptq"):
        load_target(broken)
