#!/usr/bin/env python3
"""Small models of Hugging Face's transformers, for test_weights, and what it makes of them.

weights_files.py write FOLDER: saves one model of each kind in a folder of its name.
weights_files.py read FOLDER: loads what test_weights has read from there and written to <name>-again:
every tensor, and what the model says to a few tokens, must be the same.
"""
import os
import shutil
import sys

import torch
import transformers

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, max_position_embeddings=64, rms_norm_eps=1e-5, pad_token_id=0)
LLAMA3 = {'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
          'original_max_position_embeddings': 32, 'rope_theta': 5e5}
GPT2 = dict(vocab_size=11, n_positions=8, n_layer=2, n_head=2, n_embd=8, bos_token_id=0, eos_token_id=0)
BERT = dict(vocab_size=11, max_position_embeddings=8, num_hidden_layers=2, num_attention_heads=2, hidden_size=8,
            intermediate_size=32)


def models():
    t = transformers
    yield 'llama', t.LlamaForCausalLM(t.LlamaConfig(**SIZES, rope_parameters=LLAMA3, tie_word_embeddings=False))
    yield 'mistral', t.MistralForCausalLM(t.MistralConfig(**SIZES, sliding_window=3, tie_word_embeddings=False))
    yield 'qwen2', t.Qwen2ForCausalLM(t.Qwen2Config(**dict(SIZES, head_dim=8), tie_word_embeddings=True))
    yield 'qwen3', t.Qwen3ForCausalLM(t.Qwen3Config(**SIZES, tie_word_embeddings=True))
    yield 'gemma2', t.Gemma2ForCausalLM(t.Gemma2Config(**SIZES, sliding_window=3, query_pre_attn_scalar=24,
                                                       attn_logit_softcapping=5.0, final_logit_softcapping=3.0))
    yield 'gemma3', t.Gemma3ForCausalLM(t.Gemma3TextConfig(**dict(SIZES, num_hidden_layers=7), sliding_window=3))
    yield 'phi3', t.Phi3ForCausalLM(t.Phi3Config(**dict(SIZES, head_dim=8)))
    yield 'gpt2', t.GPT2LMHeadModel(t.GPT2Config(**GPT2))
    yield 'bert', t.BertForMaskedLM(t.BertConfig(**BERT))


def write(folder):
    torch.manual_seed(1)
    for name, model in models():
        with torch.no_grad():
            for param in model.parameters():
                param.normal_(0.0, 0.3)
        shards = {'max_shard_size': '20KB'} if name == 'llama' else {}
        model.save_pretrained(os.path.join(folder, name), safe_serialization=True, **shards)


def load(folder):
    if not os.path.exists(os.path.join(folder, 'config.json')):  # test_weights writes none of GPT-2 and BERT
        shutil.copy(os.path.join(folder.removesuffix('-again'), 'config.json'), folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    model_type = getattr(transformers, config.architectures[0])
    model, info = model_type.from_pretrained(folder, config=config, output_loading_info=True, torch_dtype=torch.float32,
                                             attn_implementation='eager')
    for what in ('missing_keys', 'unexpected_keys', 'mismatched_keys'):
        assert not info[what], (folder, what, info[what])
    return model.eval()


def read(folder):
    for name in [name for name, _ in models()]:
        a, b = (load(os.path.join(folder, name + again)) for again in ('', '-again'))
        ours = b.state_dict()
        for key, value in a.state_dict().items():
            assert torch.equal(value, ours[key]), (name, key)
        tokens = torch.tensor([[1, 5, 9, 2, 7, 3]])
        with torch.no_grad():
            x, y = a(tokens).logits, b(tokens).logits
        assert torch.equal(x, y), (name, (x - y).abs().max())
        print(name, 'is the same, logits up to %.3g' % x.abs().max())


if __name__ == '__main__':
    {'write': write, 'read': read}[sys.argv[1]](sys.argv[2])
