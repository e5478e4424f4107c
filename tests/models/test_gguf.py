"""A .gguf file written here loads as the model it was written from, with its tokenizer."""

from __future__ import annotations

import gguf
import pytest
import torch

from specc.errors import ArtifactError
from specc.models.load import load_target
from tests.tiny import BOS, EOS, PAD, VOCAB, tiny_model

PROMPT = torch.tensor([[5, 9, 20, 7, 33]])
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers.": "blk.",
}


def _interleave(weight, heads):
    """Pair rotary dimensions the way GGUF files of this family store them."""
    rows, width = weight.shape
    return weight.view(heads, 2, rows // heads // 2, width).transpose(1, 2).reshape(rows, width)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    model = tiny_model("llama", head_dim=8)
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    special = ["<pad>", "<eos>", "<bos>", "<|endoftext|>"]
    writer.add_token_list([*special, *(f"w{index}" for index in range(4, VOCAB - 4)), "a", "b", "ab", "ba"])
    writer.add_token_types([3 if index < 4 else 1 for index in range(VOCAB)])
    writer.add_token_merges(["a b", "b a"])
    for add, value in (
        (writer.add_bos_token_id, BOS),
        (writer.add_eos_token_id, EOS),
        (writer.add_pad_token_id, PAD),
    ):
        add(value)
    for name, value in model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        kind = name.split(".")[-2]
        for ours, theirs in _NAMES.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, (_interleave(value, heads[kind]) if kind in heads else value).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, model


def test_loads_as_the_model_it_was_written_from(written, capfd):
    path, model = written
    loaded = load_target(path, dtype="float32", device="cpu")
    torch.testing.assert_close(loaded.module(PROMPT).logits, model(PROMPT).logits, rtol=0, atol=1e-4)
    assert loaded.info.name == "tiny"
    assert loaded.info.tokenizer_vocab == VOCAB
    assert loaded.tokenizer.convert_ids_to_tokens(20) == "w20"
    assert (loaded.tokenizer.bos_token_id, loaded.tokenizer.eos_token_id) == (BOS, EOS)
    assert loaded.generation["eos_token_id"] == EOS
    assert loaded.path == path
    assert "it/s" not in capfd.readouterr().err


def test_a_loaded_gguf_saves_as_a_plain_folder(written, tmp_path):
    path, _ = written
    loaded = load_target(path, dtype="float32", device="cpu")
    loaded.module.save_pretrained(tmp_path / "plain")
    again = load_target(tmp_path / "plain", device="cpu")
    assert torch.equal(again.module(PROMPT).logits, loaded.module(PROMPT).logits)


def test_truncated(written, tmp_path):
    data = written[0].read_bytes()
    (tmp_path / "short.gguf").write_bytes(data[: len(data) // 2])
    with pytest.raises(ArtifactError, match=r"short\.gguf"):
        load_target(tmp_path / "short.gguf")
